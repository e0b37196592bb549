"""The first pass over rows of logits, which every sampled row takes: the row maximum.

`scan_peaks` finds each row's largest sort key (`table.py`), with NaN above +inf. So one maximum of
integers gives the maximum, its lowest id and whether the row is fit; beside it stands the largest
of the row's copy, where bias or penalties made one.

A program takes a part of a row. Parts, and ranks that hold parts of the vocabulary, are combined by
integer maxima, which may be taken in any order. Ids are the whole vocabulary's.

    logits   fp32 [R, W]                     W ids from `first_id`, rows `stride` apart
    peaks    int64 [parts, R, PEAK_FIELDS]   a gather of ranks' has the same form
    groups   int64 [R, parts, PER_PART]      the largest sort keys of runs of columns
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.sampling.table import (
    BELOW_ALL,
    COPY,
    FLOAT32_MOST,
    INFINITY_KEY,
    KEYS_PER_VALUE,
    LOGITS_PEAK,
    MINUS_INFINITY_KEY,
    MOST_VALUE_KEY,
    PEAK_FIELDS,
    ROW_FIELDS,
    SAMPLED_PEAK,
    flipped,
    sort_key,
    value_key_of,
)
from tpdet.kernels.inputs.vocabulary_shard import Shard

BLOCK = tl.constexpr(2048)
"""Columns that a program reads at a time, at most."""
_GROUPS = 4096


class LogitRows(NamedTuple):
    """R rows of logits and what stands beside them, as every kernel takes them."""

    logits: torch.Tensor
    """fp32 [R, >= W], or of filtered rows that were gathered whole [F, V]."""
    copies: torch.Tensor
    """fp32 [copies, W]: rows after bias and penalties; any tensor where there are none."""
    table: torch.Tensor
    """int64 [R * ROW_FIELDS]."""
    peaks: torch.Tensor
    """int64 [parts or ranks, R, PEAK_FIELDS]."""
    slots: torch.Tensor
    """int64 [F]: the table's row of each filtered row; any tensor where there are none."""
    groups: torch.Tensor
    """int64 [R or F, groups]: the largest sort keys of runs of columns, of whole filtered rows."""
    arrivals: torch.Tensor
    """int32 [R]: programs that have summed the row; cleared by `scan_peaks`."""


class RowShape(NamedTuple):
    """Ids, stride and groups of a row; a kernel is compiled for whether 16 divides them."""

    width: int
    stride: int
    groups: int = 0


@triton.jit
def scaled(x, temperature):
    """x / T with overflow held at the largest finite fp32; -inf stays; zeros are +0.0."""
    y = tl.div_rn(x, temperature)
    y = tl.minimum(tl.maximum(y, -FLOAT32_MOST), FLOAT32_MOST)
    y = tl.where(x == -float("inf"), x, y)
    return tl.where(y == 0.0, 0.0, y)


@triton.jit
def key_with_nan(x, ids):
    """`sort_key`, any NaN above everything."""
    nan = tl.full(x.shape, MOST_VALUE_KEY, tl.int64) * KEYS_PER_VALUE + flipped(ids.to(tl.int64))
    return tl.where(x != x, nan, sort_key(x, ids))


@triton.jit
def is_fit(peak):
    """Whether a row's largest, by its sort key, is a finite number."""
    value_key = value_key_of(peak)
    return (value_key > MINUS_INFINITY_KEY) & (value_key < INFINITY_KEY)


@triton.jit
def largest_peak(peaks, row, count, PARTS: tl.constexpr):
    """The largest of a row's peaks over its parts or ranks; peaks: shifted to one of its fields.

    count: how many rows there are, and parts or ranks. They are no fields of a record, since a
    kernel is compiled for what stands in one.
    """
    height, parts = count
    part = tl.arange(0, PARTS)
    of_row = peaks + (part * height + row) * PEAK_FIELDS
    return tl.max(tl.load(of_row, mask=part < parts, other=BELOW_ALL), 0)


@triton.jit
def sampled_row(rows, shape, row, copy):
    """Where a row that is sampled from starts: its copy if it has one."""
    plain = rows.logits + row.to(tl.int64) * shape.stride
    return tl.where(copy >= 0, rows.copies + copy * shape.width, plain)


@triton.jit
def lane_peaks(start, part, width, first_id, SPAN: tl.constexpr):
    """The largest sort key of each lane of SPAN columns: int64 [min(SPAN, BLOCK)].

    Values are compared, not sort keys: a lane meets its ids from the lowest, so it keeps the first
    of equal ones (zeros of both signs are equal) and the first NaN.
    """
    LANES: tl.constexpr = min(SPAN, BLOCK)
    lane = part * SPAN + tl.arange(0, LANES)
    best = tl.full((LANES,), -float("inf"), tl.float32)
    best_at = lane
    for first in range(0, SPAN, LANES):
        at = lane + first
        x = tl.load(start + at, mask=at < width, other=-float("inf"))
        better = (x > best) | ((x != x) & (best == best))
        best = tl.where(better, x, best)
        best_at = tl.where(better, at, best_at)
    nothing = tl.full((LANES,), BELOW_ALL, tl.int64)
    return tl.where(lane < width, key_with_nan(best, first_id + best_at), nothing)


@triton.jit
def store_groups(groups, lanes, part, PER_PART: tl.constexpr):
    """The largest sort keys of a part's PER_PART runs of lanes; groups: int64 [parts, PER_PART]."""
    runs = tl.reshape(lanes, (PER_PART, lanes.shape[0] // PER_PART))
    tl.store(groups + part * PER_PART + tl.arange(0, PER_PART), tl.max(runs, axis=1))


@triton.jit(do_not_specialize=["height", "first_id"])
def scan_peaks(
    rows,
    shape,
    height,
    first_id,
    SPAN: tl.constexpr,
    PER_PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """peaks[part, row]: the largest sort keys of the logits and of what is sampled from.

    groups[row, part]: with PER_PART, the largest sort keys of that many groups of the latter.
    Program (row, part).
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    width = shape.width
    if part == 0:
        tl.store(rows.arrivals + row, 0)
    # 1. the logits as they are
    copy = tl.load(rows.table + row * ROW_FIELDS + COPY)
    start = rows.logits + row.to(tl.int64) * shape.stride
    lanes = lane_peaks(start, part, width, first_id, SPAN)
    best = tl.max(lanes, axis=0)
    out = rows.peaks + (part * height + row) * PEAK_FIELDS
    tl.store(out + LOGITS_PEAK, best)
    # 2. the row's copy, where it has one
    if copy >= 0:
        lanes = lane_peaks(rows.copies + copy * width, part, width, first_id, SPAN)
        best = tl.max(lanes, axis=0)
    tl.store(out + SAMPLED_PEAK, best)
    # 3. groups of what is sampled from
    if PER_PART > 0:
        row_groups = rows.groups + row.to(tl.int64) * (tl.num_programs(1) * PER_PART)
        store_groups(row_groups, lanes, part, PER_PART)


@triton.jit
def scan_groups(
    logits, groups, shape, SPAN: tl.constexpr, PER_PART: tl.constexpr, DEPENDENT: tl.constexpr
):
    """groups[row, part] of whole rows; program (row, part)."""
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    start = logits + row.to(tl.int64) * shape.stride
    lanes = lane_peaks(start, part, shape.width, 0, SPAN)
    row_groups = groups + row.to(tl.int64) * (tl.num_programs(1) * PER_PART)
    store_groups(row_groups, lanes, part, PER_PART)


def scan_rows(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor | None,
    shard: Shard,
) -> LogitRows:
    """Rows of a shard with their row maxima, of all ranks; with slots and whole rows also groups.

    logits fp32 [R, >= W], copies fp32 [copies, W], table int64 [R * ROW_FIELDS], slots int64 [F].
    """
    height, width = len(logits), shard.width(logits.shape[1])
    grid, span = grid_of(height, width)
    arrivals = numbers_beside(logits, height, dtype=torch.int32)
    groups = peaks = numbers_beside(logits, grid[1], height, PEAK_FIELDS.value)
    per_part = 0
    if slots is not None and shard.gather is None:
        per_part = _groups_per_part(width, span)
        groups = numbers_beside(logits, height, grid[1] * per_part)
    rows = LogitRows(
        logits, copies, table, peaks, table if slots is None else slots, groups, arrivals
    )
    shape = RowShape(width, logits.stride(0))
    scan_peaks[grid](
        rows, shape, height, shard.first_id, span, per_part, **options(logits.device, 4)
    )
    if shard.gather is not None:
        rows = rows._replace(peaks=shard.gather(peaks.amax(0)))
    return rows


def gathered_rows(rows: LogitRows, logits: torch.Tensor) -> LogitRows:
    """The same rows, with the filtered ones whole, fp32 [F, V], and their groups."""
    height, width = logits.shape
    grid, span = grid_of(height, width)
    per_part = _groups_per_part(width, span)
    groups = numbers_beside(logits, height, grid[1] * per_part)
    shape = RowShape(width, logits.stride(0))
    scan_groups[grid](logits, groups, shape, span, per_part, **options(logits.device, 4))
    return rows._replace(logits=logits, groups=groups)


def numbers_beside(x: torch.Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Memory for numbers on a tensor's device; what stands in it is left."""
    return torch.empty(*shape, dtype=dtype, device=x.device)


def options(device: torch.device, warps: int) -> dict[str, Any]:
    """Keyword arguments of every launch of the sampler."""
    return {"num_warps": warps, "enable_fp_fusion": False, **dependent_launch(device)}


@lru_cache(maxsize=1024)
def grid_of(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """Grid and span; at least one part, which may be all padding."""
    span = max(_span(rows, width), next_power_of_2(-(-width // 1024)))
    return (rows, max(1, -(-width // span))), span


def _span(rows: int, width: int) -> int:
    """Columns a program takes: the whole GPU for one row, longer runs for many."""
    for span in (8192, 4096, 2048):
        if rows * width >= span * 1024:
            return span
    return 1024


def _groups_per_part(width: int, span: int) -> int:
    """Groups a part of `span` columns has: of 64 columns, of more where a row would have 4,096."""
    return span // max(64, next_power_of_2(-(-width // _GROUPS)))
