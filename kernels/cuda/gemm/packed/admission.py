"""Start-up check of packed products: every tile, and unpacking, against the dense product's bytes.

A form's weight is drawn on the GPU: `PackedMatrix` makes its numbers, the reference variant their
product. A tile that differs, or does not run, stops the start.
"""

from collections.abc import Iterable, Sequence

import torch

from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_tile
from tpdet.kernels.cuda.gemm.leaf import leaf_gemm
from tpdet.kernels.cuda.gemm.leaf_trials import folded
from tpdet.kernels.cuda.gemm.packed.choice import PackedWay, way_of
from tpdet.kernels.cuda.gemm.packed.product import in_scratch, packed_product, packed_sums
from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    OrderedForm,
    OrderedWeight,
)
from tpdet.kernels.inputs.ordering import ordered_weight
from tpdet.kernels.inputs.packed import PackedMatrix
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import Expression, fold_tree
from tpdet.kernels.partial_sums import PartialSums

_ROWS = (1, 8, 9, 16, 32, 64, 128, 256, 512, 1024)
_TRIED = 528  # weight rows, of as many as a product has: no multiple of a tile
_SEED = 44


def failing_tiles(
    forms: Iterable[OrderedForm], products: Sequence[Product], limit: int, device: torch.device
) -> tuple[int, list[str]]:
    """How many were tried, and those that differ or do not run. limit: rows that products meet."""
    tried, failed = 0, []
    for form in sorted(forms):
        kinds = {p.kind for p in products if (p.leaves, p.n, p.k) == form.shape} or {"column"}
        weight, numbers = drawn_weight(form, device)
        if not torch.equal(in_scratch(weight).view(torch.int16), numbers.view(torch.int16)):
            failed.append(f"numbers of {form}")
        for kind in sorted(kinds):
            for data in trial_data.KINDS:
                for rows in (m for m in _ROWS if m <= max(limit, 1)):
                    way = way_of(rows, form.shape, form.group)
                    if way is None:
                        continue
                    tried += 1
                    why = _failure(kind, data, rows, weight, numbers, way)
                    if why:
                        failed.append(f"{kind} {form}, {rows} rows, {data} data ({why})")
    return tried, failed


def _failure(
    kind: str,
    data: str,
    rows: int,
    weight: OrderedWeight,
    numbers: torch.Tensor,
    way: PackedWay,
) -> str:
    """Why a product is not the dense one; empty if it is."""
    leaves, _, k = weight.shape
    x = trial_data.trial_rows(data, rows, leaves * k, numbers.device)
    try:
        if kind == "row":
            roots = _roots(leaves)
            dense = folded(PartialSums(leaf_gemm(x, numbers, REFERENCE.at(k)), roots))
            packed = folded(packed_sums(x, weight, roots, way))
        else:
            dense = by_tile(kind, x, numbers[0], REFERENCE.at(k))
            packed = packed_product(kind, x, weight, None, dense.dtype, way.tile)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    bits = torch.int32 if dense.element_size() == 4 else torch.int16
    return "" if torch.equal(packed.view(bits), dense.view(bits)) else f"other bits by {way}"


def _roots(leaves: int) -> tuple[Expression, ...]:
    """A tree over the leaves where they have one, whose forms hold those of the other orders."""
    trees = leaves & (leaves - 1) == 0
    return (fold_tree("tree", leaves),) if trees else tuple(range(leaves))


def drawn_weight(form: OrderedForm, device: torch.device) -> tuple[OrderedWeight, torch.Tensor]:
    """A random weight of a form, of few rows, and its numbers [L, N, K] by the CPU's rule."""
    leaves, n, k = form.shape
    n, generator = min(n, _TRIED), torch.Generator(device).manual_seed(_SEED)
    matrices = [_drawn_matrix(form, n, k, generator, device) for _ in range(leaves)]
    return ordered_weight(matrices), torch.stack([matrix[:] for matrix in matrices])


def _drawn_matrix(
    form: OrderedForm, n: int, k: int, generator: torch.Generator, device: torch.device
) -> PackedMatrix:
    size = n, k * form.bits // 8
    codes = torch.randint(0, 256, size, generator=generator, device=device).to(torch.uint8)
    kind, zero, zeros = "int", 128 if form.bits == 8 else 8, None
    if form.recipe in (INT4_ZERO, INT4_ZERO_OF_HALF):
        size = n, -(-k // form.group // 2)
        zeros = torch.randint(0, 256, size, generator=generator, device=device).to(torch.uint8)
        zero = 1  # as GPTQ's, from 1 to 16
    if form.recipe == E4M3:
        kind, zero, codes = "e4m3", 0, torch.where(codes & 127 == 127, codes - 1, codes)
    drawn = torch.rand(
        -(-n // form.scale_rows), k // form.group, generator=generator, device=device
    )
    if form.recipe == E2M1:
        kind, zero, scales = "e2m1", 0, (118 + 5 * drawn).to(torch.uint8)
    else:
        scales = ((drawn - 0.5) * 0.01).to(getattr(torch, form.scales))
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    scale_rows = torch.arange(n, device=device).div(form.scale_rows, rounding_mode="floor").int()
    return PackedMatrix(
        kind,
        form.bits,
        codes,
        range(k),
        scales,
        form.group,
        scale_rows=scale_rows if form.scale_rows > 1 else None,
        zeros=zeros,
        zero=zero,
        dtype=torch.bfloat16,
    )
