"""Bounds of top-k and top-p for all filtered rows of a step, and the slow way for leftover rows."""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.filter_window import (
    BUCKETS,
    CAPACITY,
    STATE,
    bound_window,
    choose_window,
    collect_window,
    count_buckets,
    row_of_slot,
    threshold_of,
)
from tpdet.kernels.cuda.gumbel_scores import scaled
from tpdet.kernels.cuda.log_softmax import fixed_point
from tpdet.kernels.cuda.order_select import order_of
from tpdet.kernels.cuda.row_scan import FIELDS

_BLOCK = 8192
_COLLECT_BLOCK = 4096
_ROW_BLOCK = 4096


@triton.jit
def weigh_from(
    start, width, temperature, top, floor, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight (1 an id, or its mass) of the ids whose order is at least `floor` and `least`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        order = order_of(x, at)
        weight = tl.full((BLOCK,), 1, tl.int64)
        if BY_MASS:
            weight = fixed_point(x, top)
        total += tl.where((at < width) & (order >= floor) & (order >= least), weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def search_row(
    start, width, temperature, top, floor, threshold, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest order from which the ids (of those from `floor` up) weigh `threshold`."""
    found = tl.full((), -9007199254740992, tl.int64)
    unit = tl.full((), 9007199254740992, tl.int64)  # orders lie in [-2^53, 2^53)
    for _ in range(54):
        weight = weigh_from(start, width, temperature, top, floor, found + unit, BY_MASS, BLOCK)
        found += tl.where(weight >= threshold, unit, 0)
        unit = unit >> 1
    return found


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def bound_rows(
    logits, copies, table, peaks, slots, bounds, rows, width, stride, peak_parts,
    FIELDS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bounds[slot] of the rows that `bound_window` left (2^62), over all ids; program (slot,)."""
    slot = tl.program_id(0)
    if tl.load(bounds + slot) == 4611686018427387904:
        start, temperature, top, top_k, numerator = row_of_slot(
            logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS,
            WHOLE,
        )  # fmt: skip
        bound = tl.full((), -9007199254740992, tl.int64)
        if top_k < width:
            bound = search_row(start, width, temperature, top, bound, top_k, False, BLOCK)
        if numerator < 1073741824:
            total = weigh_from(start, width, temperature, top, bound, bound, True, BLOCK)
            threshold = threshold_of(numerator, total)
            found = search_row(start, width, temperature, top, bound, threshold, True, BLOCK)
            bound = tl.maximum(bound, found)
        tl.store(bounds + slot, bound)


def find_bounds(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    peaks: torch.Tensor,
    slots: torch.Tensor,
    vocabulary: int,
    whole: bool,
) -> torch.Tensor:
    """Smallest kept orders int64 [F] of the rows `slots` [F] of the table; kernels only.

    `logits` are all rows' [R, >= V] (a row's copy, where it has one, in `copies` [P, V]), or with
    `whole` the filtered rows' themselves [F, V]; `peaks` [parts, R, 2] are of `scan_peaks`.
    """
    filtered, device = len(slots), logits.device
    peak_parts, rows = peaks.shape[:2]
    parts = triton.cdiv(vocabulary, _BLOCK)
    peak_width, part_width = (triton.next_power_of_2(n) for n in (peak_parts, parts))
    counts = torch.empty(filtered, parts, BUCKETS, dtype=torch.int32, device=device)
    masses = torch.empty(filtered, parts, dtype=torch.int64, device=device)
    lists = torch.empty(filtered, CAPACITY, dtype=torch.int64, device=device)
    state = torch.empty(filtered, STATE, dtype=torch.int64, device=device)
    bounds = torch.empty(filtered, dtype=torch.int64, device=device)
    rest = (rows, vocabulary, logits.stride(0), peak_parts)
    count_buckets[filtered, parts](
        logits, copies, table, peaks, slots, counts, masses, *rest, FIELDS, peak_width, whole,
        _BLOCK, BUCKETS, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    choose_window[filtered,](
        table, slots, counts, masses, lists, state, vocabulary, parts, FIELDS, STATE, BUCKETS,
        CAPACITY, part_width, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    collect_window[filtered, triton.cdiv(vocabulary, _COLLECT_BLOCK)](
        logits, copies, table, peaks, slots, lists, state, *rest, FIELDS, STATE, peak_width, whole,
        _COLLECT_BLOCK, BUCKETS, CAPACITY, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    bound_window[filtered,](
        table, peaks, slots, lists, state, bounds, rows, vocabulary, peak_parts, FIELDS, STATE,
        peak_width, CAPACITY, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    bound_rows[filtered,](
        logits, copies, table, peaks, slots, bounds, *rest, FIELDS, peak_width, whole, _ROW_BLOCK,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return bounds
