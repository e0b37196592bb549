"""Bounds of top-k and top-p for all filtered rows of a step, and samples where few ids are kept.

`candidate_list` finds most rows' bound and sample. `fallback_bounds` finds the bounds of rows that
fall through: from the windows that `value_window` collects or, after a wrong guess, by
`digit_search`.
"""

from typing import NamedTuple

import torch

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling import (
    candidate_list,
    digit_search,
    fallback_bounds,
    tied_runs,
    value_buckets,
    value_window,
)
from tpdet.kernels.cuda.sampling.answer_launches import Bounds, lanes_for
from tpdet.kernels.cuda.sampling.row_table import BOUND_FIELDS

METHODS = ("list", "window", "digits")
"""How a bound is found: each method answers for rows that fall through those before it."""

_LIST_BLOCK = 1024
_COLLECT_BLOCK = 4096
_COUNT_BLOCK = 8192
_DIGITS_BLOCK = 2048  # with twice as many `bound_fallbacks` would spill registers


class FilteredRows(NamedTuple):
    """F filtered rows, as all their kernels are given them; fields in the kernels' order."""

    logits: torch.Tensor
    """fp32 [R, >= V] of all rows, or where `whole` the filtered ones [F, V]."""
    copies: torch.Tensor
    """fp32 [copies, V]: rows after bias and penalties."""
    table: torch.Tensor
    """int64 [R * ROW_FIELDS]."""
    peaks: torch.Tensor
    """int64 [parts or ranks, R, PEAK_FIELDS]."""
    slots: torch.Tensor
    """int64 [F]: the table's rows."""


class _Sizes(NamedTuple):
    """What else the kernels are given, in their order."""

    rows: int
    vocabulary: int
    stride: int
    peak_parts: int


class _Found(NamedTuple):
    """What the kernels tell each other of F rows."""

    bounds: torch.Tensor
    states: torch.Tensor
    counts: torch.Tensor


def find_bounds(
    given: FilteredRows,
    groups: torch.Tensor,
    vocabulary: int,
    whole: bool,
    methods: tuple[str, ...] = METHODS,
) -> Bounds:
    """Smallest kept sort keys and samples of the table's rows `slots`; kernels only.

    A sample is the sort key of the best score, or ABOVE_ALL if `weigh_rows` has to find it.
    `groups` [R or F, G] are of `scan_peaks`; `whole`: `logits` are the filtered rows alone.
    `methods` may be fewer (tests): the bound of a row that none answers for stays ABOVE_ALL.
    """
    peak_parts, rows = given.peaks.shape[:2]
    sizes = _Sizes(rows, vocabulary, given.logits.stride(0), peak_parts)
    filtered = len(given.slots)
    found = _Found(
        _numbers(given, filtered, BOUND_FIELDS.value),
        _numbers(given, filtered, candidate_list.LIST_FIELDS.value),
        _numbers(given, filtered, value_buckets.BUCKETS.value, kind=torch.int32),
    )
    _list_candidates(given, sizes, groups, found, whole, "list" in methods)
    _bound_fallbacks(given, sizes, found, whole, methods)
    return Bounds(found.bounds, found.states)


def _list_candidates(
    given: FilteredRows,
    sizes: _Sizes,
    groups: torch.Tensor,
    found: _Found,
    whole: bool,
    answers: bool,
) -> None:
    """Floors, candidates and masses; with `answers` the bounds and samples from the lists."""
    filtered, device, used = len(given.slots), given.logits.device, groups.shape[1]
    group_width = lanes_for(used)
    lists = _numbers(given, filtered, candidate_list.CAPACITY.value)
    candidate_list.choose_floor[filtered,](
        *given,
        groups,
        found.states,
        found.counts,
        found.bounds,
        used,
        *sizes,
        lanes_for(sizes.peak_parts),
        whole,
        group_width,
        num_warps=8,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    candidate_list.list_candidates[filtered, -(-sizes.vocabulary // _LIST_BLOCK)](
        given.logits,
        given.copies,
        given.table,
        given.slots,
        lists,
        found.states,
        sizes.vocabulary,
        sizes.stride,
        whole,
        _LIST_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    if answers:
        candidate_list.bound_candidates[filtered,](
            given.table,
            given.slots,
            lists,
            groups,
            found.states,
            found.bounds,
            used,
            sizes.vocabulary,
            whole,
            group_width,
            num_warps=16,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )


def _bound_fallbacks(
    given: FilteredRows, sizes: _Sizes, found: _Found, whole: bool, methods: tuple[str, ...]
) -> None:
    """The bounds of rows that fall through; a program of another row ends at once."""
    filtered = len(given.slots)
    parts = -(-sizes.vocabulary // _COLLECT_BLOCK)
    windows = _numbers(given, filtered, value_window.WINDOW_FIELDS.value)
    lists = _numbers(given, filtered, value_window.CAPACITY.value)
    run_parts = _numbers(given, filtered, tied_runs.RUNS.value, parts, kind=torch.int32)
    if "window" in methods:
        _collect_windows(given, sizes, found, whole, (lists, run_parts, windows))
    fallback_bounds.bound_fallbacks[filtered,](
        *given,
        found.states,
        found.bounds,
        lists,
        run_parts,
        windows,
        _numbers(given, filtered, digit_search.DIGITS.value),
        *sizes,
        parts,
        lanes_for(sizes.peak_parts),
        whole,
        _COLLECT_BLOCK,
        lanes_for(parts),
        _DIGITS_BLOCK,
        "window" in methods,
        "digits" in methods,
        num_warps=16,
        enable_fp_fusion=False,
        **dependent_launch(given.logits.device),
    )


def _collect_windows(
    given: FilteredRows,
    sizes: _Sizes,
    found: _Found,
    whole: bool,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Counts buckets, chooses windows and collects them into lists, parts of runs and windows."""
    filtered, device = len(given.slots), given.logits.device
    lists, run_parts, windows = into
    peak_width = lanes_for(sizes.peak_parts)
    value_window.count_buckets[filtered, -(-sizes.vocabulary // _COUNT_BLOCK)](
        *given,
        found.states,
        found.bounds,
        found.counts,
        windows,
        *sizes,
        peak_width,
        whole,
        _COUNT_BLOCK,
        num_warps=16,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    value_window.collect_window[filtered, run_parts.shape[2]](
        *given,
        found.states,
        found.bounds,
        lists,
        run_parts,
        windows,
        *sizes,
        peak_width,
        whole,
        _COLLECT_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )


def _numbers(given: FilteredRows, *shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    """Room for integers beside the logits."""
    return torch.empty(*shape, dtype=kind, device=given.logits.device)
