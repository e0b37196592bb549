"""Launches of the kernels that read packed weights."""

from math import prod
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm.packed.chain import PackedForm, packed_chain, unpacked_weight
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.ordered import UNIT, OrderedWeight

ONE_LEAF = RootShape(1, 1, 1)
_LINE = 128  # bytes of a swizzled line
_UNPACKED_DEPTH = 128  # columns of a program that writes numbers


class PackedTile(NamedTuple):
    """rows: of x; groups: warpgroups of 64 weight rows; depth, stages: of K."""

    rows: int
    groups: int
    depth: int
    stages: int


def run_packed(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
    gated: int = 0,
    root: RootShape = ONE_LEAF,
) -> None:
    """x [M, L * K] by leaves [L, N, K] -> y [L / leaves of a root, M, N], gates [1, M, N / 2].

    root: what a program folds. Raises ValueError for a leaf that is not an even number of the
    tile's steps.
    """
    leaves, n, k = weight.shape
    if k % (2 * tile.depth):
        raise ValueError(f"leaves of {k} are no even number of steps of {tile.depth}")
    m, lines = x.shape[0], tile.depth * weight.bits // 16
    folded = prod(root)
    scales = triton.next_power_of_2(folded * k // weight.group)
    kept = max(scales, tile.depth // weight.group)
    packed_chain[(cdiv(m, tile.rows) * cdiv(n, UNIT * tile.groups), leaves // folded)](
        TensorDescriptor.from_tensor(
            weight.codes, [tile.groups, lines, 32], NVMMASharedLayout(_LINE, 32, 3)
        ),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth], NVMMASharedLayout(_LINE, 16, 2)),
        weight.scales,
        y,
        weight.codes if bias is None else bias,
        m,
        n,
        k // tile.depth,
        cdiv(n, UNIT),
        FORM=_form(weight, tile, kept, bias is not None, gated, root),
        num_warps=4 * tile.groups,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def run_unpack(weight: OrderedWeight, out: torch.Tensor) -> None:
    """out [L, N, K] bf16 = the weight's numbers."""
    leaves, n, k = weight.shape
    blocks = cdiv(n, UNIT)
    unpacked_weight[(leaves * blocks, k // _UNPACKED_DEPTH)](
        weight.codes,
        weight.scales,
        out,
        n,
        k,
        blocks,
        FORM=_form(weight, PackedTile(16, 1, _UNPACKED_DEPTH, 1), 1, False, 0),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(out.device),
    )


def _form(
    weight: OrderedWeight,
    tile: PackedTile,
    kept: int,
    bias: bool,
    gated: int,
    root: RootShape = ONE_LEAF,
) -> PackedForm:
    return PackedForm(
        weight.recipe,
        weight.bits,
        tile.rows,
        tile.groups,
        tile.depth,
        tile.stages,
        weight.group,
        weight.scale_rows,
        kept,
        bias,
        gated,
        root,
    )
