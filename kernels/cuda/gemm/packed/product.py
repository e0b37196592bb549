"""Products by packed weights: by a tile that unpacks its own, or dense over numbers in scratch."""

import torch

from tpdet.kernels.cuda.gemm.choice.leaf_choice import cut_roots
from tpdet.kernels.cuda.gemm.packed.choice import PackedWay, way_of
from tpdet.kernels.cuda.gemm.packed.launch import (
    ONE_LEAF,
    PackedTile,
    folds,
    run_packed,
    run_unpack,
)
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape, root_form
from tpdet.kernels.inputs.activations import activation_number
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums

_ALIGNED = 8  # values of x that the copy engine takes together
_scratch: dict[torch.device, torch.Tensor] = {}


def way_for(x: torch.Tensor, weight: OrderedWeight) -> PackedWay | None:
    """What runs the product of these rows; None: the dense one, of numbers `in_scratch`."""
    return way_of(len(x), weight.shape, weight.group)


def packed_product(
    kind: str,
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: PackedTile,
) -> torch.Tensor:
    """x [M, K] by one leaf [N, K] -> [M, N], of a gated kind [M, N / 2]; as `product_of_kind`."""
    gated, n = activation_number(kind), weight.shape[1]
    y = torch.empty(1, len(x), n // 2 if gated else n, dtype=out_dtype, device=x.device)
    _fill(y, x, weight, bias, gated, tile, ONE_LEAF)
    return y[0]


def packed_sums(
    x: torch.Tensor, weight: OrderedWeight, roots: tuple[Expression, ...], way: PackedWay
) -> PartialSums:
    """x [M, L * K] by leaves [L, N, K] -> sums [C, M, N] fp32 of subtrees of `roots`.

    The cut is halved until the roots have it and the tile folds it.
    """
    leaves, cut, shape, rest = weight.shape[0], way.cut, ONE_LEAF, roots
    while cut > 1:
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if parts is not None and form is not None and folds(way.tile, form.shape):
            shape, rest = form.shape, parts[1]
            break
        cut //= 2
    y = torch.empty(leaves // cut, len(x), weight.shape[1], dtype=torch.float32, device=x.device)
    _fill(y, x, weight, None, 0, way.tile, shape)
    return PartialSums(y, rest)


def _fill(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: OrderedWeight,
    bias: torch.Tensor | None,
    gated: int,
    tile: PackedTile,
    root: RootShape,
) -> None:
    leaves, _, k = weight.shape
    if x.dtype != torch.bfloat16 or x.shape[1] != leaves * k:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a weight {weight.shape}")
    if x.stride(1) != 1 or x.stride(0) % _ALIGNED or x.data_ptr() % (2 * _ALIGNED):
        x = x.clone(memory_format=torch.contiguous_format)
    if y.numel():
        run_packed(x, weight, bias, y, tile, gated, root)


def in_scratch(weight: OrderedWeight) -> torch.Tensor:
    """The numbers [L, N, K] in memory that the next product writes over: one stream has one."""
    leaves, n, k = weight.shape
    room = scratch_of(weight.codes.device, leaves * n * k)
    numbers = room[: leaves * n * k].view(leaves, n, k)
    run_unpack(weight, numbers)
    return numbers


def scratch_of(device: torch.device, values: int) -> torch.Tensor:
    """Memory for that many numbers, the same as before if it is large enough.

    A start's warm-up runs every product before graphs are captured, so it does not grow under one.
    """
    room = _scratch.get(device)
    if room is None or len(room) < values:
        _scratch.pop(device, None)
        room = _scratch[device] = torch.empty(values, dtype=torch.bfloat16, device=device)
    return room
