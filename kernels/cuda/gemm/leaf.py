"""Row products of the GPU path: one fp32 chain a leaf, subtrees of the fold where that is faster.

    leaf:   y[l, m, n] = sum over k of x[m, l * K + k] * w[l, n, k]                     fp32
    sums:   y[c, m, n] = subtree c of a rank's roots over its leaves                    fp32

The cut, the tile and the kernel come from the shape table that start-up admitted, else from
`leaf_choice`; all are one bit class, so the choice shows in time only.
"""

import math

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.cost.static import leaf_choice, leaf_tile
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice, cut_roots
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted
from tpdet.kernels.cuda.gemm.choice.variants import FOLDS, variant_of
from tpdet.kernels.cuda.gemm.operands import check_depth, descriptor_sms, fitted, run_chain
from tpdet.kernels.cuda.gemm.packed.product import in_scratch, packed_sums, way_for
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums


def leaf_gemm(x: torch.Tensor, weight: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """One fp32 chain a leaf: x [M, L * K], weight [L, N, K] -> partial sums [L, M, N] in fp32."""
    x, w = fitted(x, weight)
    m, (leaves, n, k) = x.shape[0], w.shape
    y = torch.empty(leaves, m, n, dtype=torch.float32, device=x.device)
    sms = descriptor_sms(x, w, y)
    if tile is None:
        tile = leaf_tile(m, n, k, leaves, float32=x.dtype == torch.float32, sms=sms)
    run_chain(Operands(x, w, None, y), tile, sms)
    return y


def unequal_leaf_gemm(
    x: torch.Tensor, weight: torch.Tensor, widths: tuple[int, ...], tile: Tile | None = None
) -> torch.Tensor:
    """One fp32 chain a leaf: x [M, K], weight [1, N, K] -> [L, M, N] in fp32; K is widths' sum."""
    x, w = fitted(x, weight)
    m, n, leaves = x.shape[0], w.shape[1], len(widths)
    y = torch.empty(leaves, m, n, dtype=torch.float32, device=x.device)
    sms = descriptor_sms(x, w, y)
    if tile is None:
        float32 = x.dtype == torch.float32
        tile = leaf_tile(m, n, math.gcd(*widths), leaves, float32=float32, sms=sms)
    run_chain(Operands(x, w, None, y, widths=widths), tile, sms)
    return y


def leaf_sums(
    x: torch.Tensor,
    weight: torch.Tensor | OrderedWeight,
    roots: tuple[Expression, ...],
    choice: LeafChoice | None = None,
    admitted: Admitted | None = None,
    widths: tuple[int, ...] = (),
) -> PartialSums:
    """x [M, L * K], weight [L, N, K] -> sums [C, M, N] fp32 of subtrees of `roots`.

    `roots` are over this rank's leaves, counted from 0; `choice` overrides what was admitted.
    widths: of leaves of unequal K, whose weight is [1, N, their sum]; they stay apart.
    Raises ValueError for operands that do not fit, and for a choice that the roots have no cut for.
    """
    if isinstance(weight, OrderedWeight):
        way = way_for(x, weight)
        if way is not None:
            return packed_sums(x, weight, roots, way)
        weight = in_scratch(weight)
    if widths:
        return PartialSums(unequal_leaf_gemm(x, weight, widths), roots)
    x, w = fitted(x, weight)
    m, (leaves, n, k) = x.shape[0], w.shape
    sms = 0 if n % 4 else descriptor_sms(x, w)  # a descriptor's rows are multiples of 16 bytes
    if choice is None and admitted is not None:
        choice = admitted.leaf_choice(x, n, leaves, roots)
        if choice is not None and variant_of(choice.tile).descriptors and not sms:
            choice = None
    if choice is None:
        float32 = x.dtype == torch.float32
        gpu = hardware.gpu_of(x.device)
        choice = leaf_choice(m, n, k, leaves, roots, float32=float32, sms=sms, gpu=gpu)
    if choice.kernel not in FOLDS and choice.cut > 1:
        raise ValueError(f"no kernel {choice.kernel!r} folds leaves: use one of {tuple(FOLDS)}")
    units, rest, form = _cut(leaves, roots, choice.cut)
    y = torch.empty(len(units), m, n, dtype=torch.float32, device=x.device)
    operands = Operands(x, w, None, y)
    check_depth(choice.tile, operands)
    if choice.cut == 1:
        run_chain(operands, choice.tile, sms)
    elif y.numel():
        FOLDS[choice.kernel].run(operands, form, choice.tile, sms)
    return PartialSums(y, rest)


def _cut(
    leaves: int, roots: tuple[Expression, ...], cut: int
) -> tuple[tuple[Expression, ...], tuple[Expression, ...], RootForm]:
    parts = cut_roots(roots, cut)
    form = None if parts is None else root_form(0, leaves, parts[0])
    if parts is None or form is None:
        raise ValueError(f"roots {roots} over {leaves} leaves have no cut of {cut}")
    return *parts, form
