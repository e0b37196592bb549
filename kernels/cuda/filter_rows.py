"""Bounds of top-k and top-p for all filtered rows of a step, and draws where the kept are few.

`filter_top` finds most rows' bound and draw; `filter_window` the bounds of rows left over, with
`score_rows` to draw; `bound_rows`, one program a row, those of rows for which a guess proved wrong.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda import filter_top, filter_window
from tpdet.kernels.cuda.filter_row import row_of_slot, threshold_of
from tpdet.kernels.cuda.gumbel_scores import scaled
from tpdet.kernels.cuda.log_softmax import fixed_point
from tpdet.kernels.cuda.order_select import order_of
from tpdet.kernels.cuda.row_scan import FIELDS

_LIST_BLOCK = 2048
_COLLECT_BLOCK = 4096
_COMPARED = 128
_FEW = 512
_COUNT_BLOCK = 8192
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
    if tl.load(bounds + slot * 2) == 4611686018427387904:
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
        tl.store(bounds + slot * 2, bound)


def find_bounds(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    peaks: torch.Tensor,
    slots: torch.Tensor,
    groups: torch.Tensor,
    vocabulary: int,
    whole: bool,
) -> torch.Tensor:
    """Smallest kept orders and draws int64 [F, 2] of the rows `slots` [F] of the table.

    A draw is the order of the best score, or 2^62 if `score_rows` has to find it. `logits` are all
    rows' [R, >= V] (a row's copy, where it has one, in `copies` [P, V]), or with `whole` the
    filtered rows' themselves [F, V]; `peaks` [parts, R, 2] and `groups` [R or F, G] are of
    `scan_peaks`. Kernels only.
    """
    filtered, device = len(slots), logits.device
    peak_parts, rows = peaks.shape[:2]
    peak_width = triton.next_power_of_2(peak_parts)
    rest = (rows, vocabulary, logits.stride(0), peak_parts)
    given = logits, copies, table, peaks, slots
    buckets, enough = filter_window.BUCKETS, filter_top.ENOUGH
    sizes = FIELDS, filter_top.STATE, peak_width, whole
    counts = torch.empty(filtered, buckets, dtype=torch.int32, device=device)
    state = torch.empty(filtered, filter_top.STATE, dtype=torch.int64, device=device)
    bounds = torch.empty(filtered, 2, dtype=torch.int64, device=device)
    lists = torch.empty(filtered, filter_top.CAPACITY, dtype=torch.int64, device=device)
    used = groups.shape[1]
    filter_top.choose_floor[filtered,](
        *given, groups, state, counts, bounds, used, *rest, *sizes,
        triton.next_power_of_2(used), enough, filter_top.CAPACITY, buckets,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    filter_top.list_top[filtered, triton.cdiv(vocabulary, _LIST_BLOCK)](
        logits, copies, table, slots, lists, state, vocabulary, logits.stride(0), FIELDS,
        filter_top.STATE, whole, _LIST_BLOCK, filter_top.CAPACITY,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    filter_top.bound_top[filtered,](
        *given, lists, state, bounds, *rest, *sizes, _COMPARED, _FEW, filter_top.CAPACITY,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _bound_rest(given, rest, state, counts, bounds, whole)
    return bounds


def _bound_rest(
    given: tuple[torch.Tensor, ...], rest: tuple[int, int, int, int], tops: torch.Tensor,
    counts: torch.Tensor, bounds: torch.Tensor, whole: bool,
) -> None:  # fmt: skip
    """The bounds of rows left over; a program of another row ends at once."""
    table, slots = given[2], given[4]
    filtered, device, vocabulary = len(slots), table.device, rest[1]
    peak_width = triton.next_power_of_2(rest[3])
    parts = triton.cdiv(vocabulary, _COLLECT_BLOCK)
    held, buckets, capacity = filter_window.STATE, filter_window.BUCKETS, filter_window.CAPACITY
    state = torch.empty(filtered, held, dtype=torch.int64, device=device)
    lists = torch.empty(filtered, capacity, dtype=torch.int64, device=device)
    parts_of = torch.empty(filtered, 3, parts, dtype=torch.int32, device=device)
    filter_window.count_buckets[filtered, triton.cdiv(vocabulary, _COUNT_BLOCK)](
        *given, tops, bounds, counts, *rest, FIELDS, filter_top.STATE, peak_width, whole,
        _COUNT_BLOCK, buckets, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    filter_window.choose_window[filtered,](
        table, slots, tops, bounds, counts, state, vocabulary, FIELDS, filter_top.STATE, held,
        buckets, filter_window.ROOM, capacity, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    filter_window.collect_window[filtered, parts](
        *given, tops, bounds, lists, parts_of, state, *rest, FIELDS, filter_top.STATE, held,
        peak_width, whole, _COLLECT_BLOCK, buckets, capacity, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    filter_window.bound_window[filtered,](
        *given, tops, bounds, lists, parts_of, state, *rest, parts, FIELDS, filter_top.STATE,
        held, peak_width, whole, _COLLECT_BLOCK, capacity, triton.next_power_of_2(parts),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    bound_rows[filtered,](
        *given, bounds, *rest, FIELDS, peak_width, whole, _ROW_BLOCK,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
