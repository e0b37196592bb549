"""Bounds of top-k and top-p for all filtered rows of a step, and samples where the kept are few.

`filter_top` finds most rows' bound and sample. `filter_rest` finds the bounds of rows that fall
through: from the windows that `filter_window` collects or, after a wrong guess, from whole rows.
"""

import torch
import triton

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling import (
    filter_buckets,
    filter_digits,
    filter_rest,
    filter_top,
    filter_window,
)
from tpdet.kernels.cuda.sampling.row_scan import FIELDS

WAYS = ("list", "window", "rows")
"""How a bound is found: each way answers for rows that fall through those before it."""

_LIST_BLOCK = 1024
_COLLECT_BLOCK = 4096
_COMPARED = 128
_FEW = 512
_COUNT_BLOCK = 8192
_ROW_BLOCK = 2048  # with twice as many `bound_rest` would spill registers


def find_bounds(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    peaks: torch.Tensor,
    slots: torch.Tensor,
    groups: torch.Tensor,
    vocabulary: int,
    whole: bool,
    ways: tuple[str, ...] = WAYS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest kept orders and samples int64 [F, 2] of the table's rows `slots` [F], and states.

    A sample is the order of the best score, or 2^62 if `weigh_rows` has to find it. `logits` are
    all rows' [R, >= V] (a row's copy, where it has one, in `copies` [P, V]), or with `whole` the
    filtered rows' themselves [F, V]; `peaks` [parts, R, 2] and `groups` [R or F, G] are of
    `scan_peaks`; states are of `filter_top`. Kernels only. `ways` may be
    fewer (tests): a row that none answers for keeps 2^62.
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
        *given,
        groups,
        state,
        counts,
        bounds,
        used,
        *rest,
        *sizes,
        triton.next_power_of_2(used),
        enough,
        filter_top.CAPACITY,
        buckets,
        num_warps=8,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    filter_top.list_top[filtered, triton.cdiv(vocabulary, _LIST_BLOCK)](
        logits,
        copies,
        table,
        slots,
        lists,
        state,
        vocabulary,
        logits.stride(0),
        FIELDS,
        filter_top.STATE,
        whole,
        _LIST_BLOCK,
        filter_top.CAPACITY,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    if "list" in ways:
        filter_top.bound_top[filtered,](
            table,
            slots,
            lists,
            groups,
            state,
            bounds,
            used,
            vocabulary,
            FIELDS,
            filter_top.STATE,
            whole,
            _COMPARED,
            _FEW,
            filter_top.CAPACITY,
            triton.next_power_of_2(used),
            num_warps=16,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
    _bound_rest(given, rest, state, counts, bounds, whole, ways)
    return bounds, state


def _bound_rest(
    given: tuple[torch.Tensor, ...],
    rest: tuple[int, int, int, int],
    tops: torch.Tensor,
    counts: torch.Tensor,
    bounds: torch.Tensor,
    whole: bool,
    ways: tuple[str, ...],
) -> None:
    """The bounds of rows that fall through; a program of another row ends at once."""
    slots, device, vocabulary = given[4], given[2].device, rest[1]
    filtered, peak_width = len(slots), triton.next_power_of_2(rest[3])
    parts = triton.cdiv(vocabulary, _COLLECT_BLOCK)
    buckets, capacity = filter_buckets.BUCKETS, filter_window.CAPACITY
    state = torch.empty(filtered, filter_window.STATE, dtype=torch.int64, device=device)
    lists = torch.empty(filtered, capacity, dtype=torch.int64, device=device)
    parts_of = torch.empty(filtered, 3, parts, dtype=torch.int32, device=device)
    digits = torch.empty(filtered, filter_digits.DIGITS, dtype=torch.int64, device=device)
    sizes = FIELDS, filter_top.STATE, filter_window.STATE, peak_width, whole
    if "window" in ways:
        filter_window.count_buckets[filtered, triton.cdiv(vocabulary, _COUNT_BLOCK)](
            *given,
            tops,
            bounds,
            counts,
            state,
            *rest,
            *sizes,
            _COUNT_BLOCK,
            buckets,
            filter_window.ROOM,
            capacity,
            num_warps=16,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
        filter_window.collect_window[filtered, parts](
            *given,
            tops,
            bounds,
            lists,
            parts_of,
            state,
            *rest,
            *sizes,
            _COLLECT_BLOCK,
            buckets,
            capacity,
            num_warps=8,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
    filter_rest.bound_rest[filtered,](
        *given,
        tops,
        bounds,
        lists,
        parts_of,
        state,
        digits,
        *rest,
        parts,
        *sizes,
        _COLLECT_BLOCK,
        capacity,
        triton.next_power_of_2(parts),
        _ROW_BLOCK,
        filter_digits.DIGITS,
        "window" in ways,
        "rows" in ways,
        num_warps=16,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
