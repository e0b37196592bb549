"""Launches of the kernels that read packed weights."""

from math import prod
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm.packed.chain import (
    DENSE,
    IN_BLOCKS,
    OF_STEP,
    PackedForm,
    packed_chain,
)
from tpdet.kernels.cuda.gemm.packed.numbers import NumbersForm, unpacked_weight
from tpdet.kernels.cuda.gemm.packed.turns import packed_turns
from tpdet.kernels.cuda.gemm.packed.warp_specialised import WarpPackedForm, warp_packed_chain
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.ordered import UNIT, OrderedWeight

ONE_LEAF = RootShape(1, 1, 1)
_LINE = 128  # bytes of a swizzled line
_SLOTS_BYTES = 64 << 10  # of finished tiles, that shared memory has beside the stages
_UNPACKED_DEPTH = 128  # columns of a program that writes numbers


class PackedTile(NamedTuple):
    """rows: of x; groups: warpgroups of 64 weight rows; depth, stages: of K; specialised: whether
    another warp copies for them (`warp_specialised.py`), two groups or three; programs: of a
    multiprocessor, where in `chain.py` another warp copies, else 0; turns: whether two warpgroups
    share a chain (`turns.py`), by leaves of dense products with a warp that copies."""

    rows: int
    groups: int
    depth: int
    stages: int
    specialised: bool = False
    programs: int = 0
    turns: bool = False


class RowBlocks(NamedTuple):
    """Rows of experts. expert_ids: int32, how many blocks there are and the expert of each;
    of_step: whether all blocks read the same rows."""

    expert_ids: torch.Tensor
    of_step: bool


def folds(tile: PackedTile, root: RootShape) -> bool:
    """Whether a program of the tile folds such roots: one of warps has room for two levels."""
    if tile.turns or tile.groups == 3:
        return root == ONE_LEAF
    return not tile.specialised or root.GROUPS == 1 or root.PARTS == 1


def run_packed(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
    gated: int = 0,
    root: RootShape = ONE_LEAF,
    blocks: RowBlocks | None = None,
) -> None:
    """x [M, L * K] by leaves [L, N, K] -> y [L / leaves of a root, M, N], gates [1, M, N / 2].

    root: what a program folds. blocks: of experts, each a leaf: x [P, K] -> y [1, P, N], bias [L,
    N]. Raises ValueError for leaves that are not whole steps of the tile.
    """
    k = weight.shape[2]
    if k % tile.depth or k // tile.depth < 2:
        raise ValueError(f"leaves of {k} are not two or more whole steps of {tile.depth}")
    if not folds(tile, root):
        raise ValueError(f"{tile} does not fold {root}")
    if tile.turns:
        if blocks is not None or tile.groups != 1:
            raise ValueError(f"{tile} is of a dense product, not of {blocks}")
        _run_turns(x, weight, bias, y, tile, gated)
        return
    launch = _run_warps if tile.specialised else _run_chain
    launch(x, weight, bias, y, tile, gated, root, blocks)


def _run_chain(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
    gated: int,
    root: RootShape,
    blocks: RowBlocks | None,
) -> None:
    (leaves, n, k), m = weight.shape, y.shape[1]
    units = 1 if blocks else leaves // prod(root)
    packed_chain[(_blocks(m, tile, blocks) * cdiv(n, UNIT * tile.groups), units)](
        *_operands(x, weight, bias, y, tile),
        weight.codes if blocks is None else blocks.expert_ids,
        m,
        n,
        k // tile.depth,
        cdiv(n, UNIT),
        FORM=_chain_form(weight, tile, bias, gated, root, blocks),
        num_warps=4 * tile.groups,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _run_turns(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
    gated: int,
) -> None:
    (leaves, n, k), m = weight.shape, y.shape[1]
    packed_turns[(cdiv(m, tile.rows) * cdiv(n, UNIT), leaves)](
        *_operands(x, weight, bias, y, tile),
        m,
        n,
        k // tile.depth,
        cdiv(n, UNIT),
        FORM=_chain_form(weight, tile, bias, gated, ONE_LEAF, None),
        HANDED=NVMMASharedLayout(_LINE, 32, 2),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _operands(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
) -> tuple[TensorDescriptor | torch.Tensor, ...]:
    """What both kernels of a chain read and write; in place of what there is not, any tensor."""
    box = [tile.groups, tile.depth * weight.bits // 16, 32]
    return (
        TensorDescriptor.from_tensor(weight.codes, box, NVMMASharedLayout(_LINE, 32, 3)),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth], NVMMASharedLayout(_LINE, 16, 2)),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        y,
        weight.codes if bias is None else bias,
    )


def _chain_form(
    weight: OrderedWeight,
    tile: PackedTile,
    bias: torch.Tensor | None,
    gated: int,
    root: RootShape,
    blocks: RowBlocks | None,
) -> PackedForm:
    """What a kernel of a chain is compiled for."""
    k, group = weight.shape[2], weight.group
    return PackedForm(
        weight.recipe,
        weight.bits,
        tile.rows,
        tile.groups,
        tile.depth,
        tile.stages,
        group,
        weight.scale_rows,
        max(triton.next_power_of_2(prod(root) * k // group), tile.depth // group),
        bias is not None,
        gated,
        root,
        k // tile.depth % 2 == 1,
        _rows_of(blocks),
        tile.programs,
    )


def _run_warps(
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PackedTile,
    gated: int,
    root: RootShape,
    blocks: RowBlocks | None,
) -> None:
    (_, n, k), (roots, m, width) = weight.shape, y.shape
    across, lines = width * UNIT // n, tile.depth * weight.bits // 16
    tiles = roots * _blocks(m, tile, blocks) * cdiv(n, tile.groups * UNIT)
    slots = tile.groups * tile.rows * across * y.element_size()
    slot = NVMMASharedLayout(min(_LINE, across * y.element_size()), 8 * y.element_size(), 2)
    warp_packed_chain[(min(multiprocessors(x.device), tiles),)](
        TensorDescriptor.from_tensor(weight.codes, [1, lines, 32], NVMMASharedLayout(_LINE, 32, 3)),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth], NVMMASharedLayout(_LINE, 16, 2)),
        TensorDescriptor.from_tensor(y.view(-1, width), [tile.rows, across], slot),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        y,
        weight.codes if bias is None else bias,
        weight.codes if blocks is None else blocks.expert_ids,
        m,
        n,
        roots,
        k // tile.depth,
        FORM=WarpPackedForm(
            weight.recipe,
            weight.bits,
            tile.rows,
            1,
            tile.depth,
            tile.stages,
            weight.group,
            weight.scale_rows,
            bias is not None,
            gated,
            root,
            k // tile.depth % 2 == 1,
            _rows_of(blocks),
            (roots == 1 or m % tile.rows == 0) and slots <= _SLOTS_BYTES,
            tile.groups,
        ),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _blocks(m: int, tile: PackedTile, blocks: RowBlocks | None) -> int:
    """Blocks of rows, of experts as many as there could be."""
    return cdiv(m, tile.rows) if blocks is None else len(blocks.expert_ids) - 1


def _rows_of(blocks: RowBlocks | None) -> int:
    """What rows of x are those of."""
    if blocks is None:
        return DENSE.value
    return OF_STEP.value if blocks.of_step else IN_BLOCKS.value


def run_unpack(weight: OrderedWeight, out: torch.Tensor) -> None:
    """out [L, N, K] bf16 = the weight's numbers."""
    (leaves, n, k), blocks = weight.shape, cdiv(weight.shape[1], UNIT)
    depth = UNIT if k % _UNPACKED_DEPTH else _UNPACKED_DEPTH
    unpacked_weight[(leaves * blocks, k // depth)](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        n,
        k,
        blocks,
        FORM=NumbersForm(weight.recipe, weight.bits, 16, 1, depth, weight.group, weight.scale_rows),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(out.device),
    )
