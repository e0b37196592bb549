"""Bounds of top-k and top-p for all filtered rows of a step, and draws where the kept are few.

`filter_top` finds most rows' bound and draw; `filter_window` the bounds of rows left over, with
`score_rows` to draw; `filter_digits` those of rows for which a guess proved wrong.
"""

import torch
import triton

from tpdet.kernels.cuda import filter_buckets, filter_digits, filter_top, filter_window
from tpdet.kernels.cuda.row_scan import FIELDS

_LIST_BLOCK = 2048
_COLLECT_BLOCK = 4096
_COMPARED = 128
_FEW = 512
_COUNT_BLOCK = 8192
_ROW_BLOCK = 4096


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
    buckets, enough = filter_buckets.BUCKETS, filter_top.ENOUGH
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
    held, buckets, capacity = filter_window.STATE, filter_buckets.BUCKETS, filter_window.CAPACITY
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
    digits = torch.empty(filtered, filter_digits.DIGITS, dtype=torch.int64, device=device)
    filter_digits.bound_rows[filtered,](
        *given, bounds, digits, *rest, FIELDS, peak_width, whole, _ROW_BLOCK, filter_digits.DIGITS,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
