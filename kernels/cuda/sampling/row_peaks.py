"""The first pass over rows of logits, which every sampled row takes: the largest sort key.

`scan_peaks` finds each row's largest sort key (`sort_keys.py`), with NaN above +inf. So one maximum
of integers gives the maximum, its lowest id and whether the row is fit; beside it stands the
largest of the row's copy, where bias or penalties made one.

A program takes a part of a row. Parts, and ranks that hold parts of the vocabulary, are combined by
integer maxima, which may be taken in any order. Ids are the whole vocabulary's.

    logits   fp32 [R, W]                     W ids from `first_id`, rows `stride` apart
    copies   fp32 [copies, W]                rows after bias and penalties
    table    int64 [R, ROW_FIELDS]           `row_table.py`
    peaks    int64 [parts, R, PEAK_FIELDS]   a gather of ranks' has the same form
    groups   int64 [R, parts, PER_PART]      the largest sort keys of runs of columns
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.row_table import (
    COPY,
    LOGITS_PEAK,
    PEAK_FIELDS,
    ROW_FIELDS,
    SAMPLED_PEAK,
)
from tpdet.kernels.cuda.sampling.sort_keys import (
    BELOW_ALL,
    INFINITY_KEY,
    KEYS_PER_VALUE,
    MINUS_INFINITY_KEY,
    MOST_VALUE_KEY,
    flipped,
    sort_key,
    value_key_of,
)


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
def largest_peak(peaks, row, rows, parts, PARTS: tl.constexpr):
    """The largest of a row's peaks over its parts or ranks; peaks: shifted to one of its fields."""
    at = tl.arange(0, PARTS)
    return tl.max(
        tl.load(peaks + (at * rows + row) * PEAK_FIELDS, mask=at < parts, other=BELOW_ALL), 0
    )


@triton.jit
def sampled_row(logits, copies, row, copy, stride, width):
    """Where a row that is sampled from starts: its copy if it has one."""
    plain = logits + row.to(tl.int64) * stride
    return tl.where(copy >= 0, copies + copy * width, plain)


@triton.jit
def lane_peaks(start, part, width, first_id, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """The largest sort key of each lane of SPAN columns: int64 [BLOCK].

    Values are compared, not sort keys: a lane meets its ids from the lowest, so it keeps the first
    of equal ones (zeros of both signs are equal) and the first NaN.
    """
    lane = part * SPAN + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_at = lane
    for first in range(0, SPAN, BLOCK):
        at = lane + first
        x = tl.load(start + at, mask=at < width, other=-float("inf"))
        better = (x > best) | ((x != x) & (best == best))
        best = tl.where(better, x, best)
        best_at = tl.where(better, at, best_at)
    nothing = tl.full((BLOCK,), BELOW_ALL, tl.int64)
    return tl.where(lane < width, key_with_nan(best, first_id + best_at), nothing)


@triton.jit
def store_groups(groups, lanes, part, PER_PART: tl.constexpr):
    """The largest sort keys of a part's PER_PART runs of lanes; groups: int64 [parts, PER_PART]."""
    runs = tl.reshape(lanes, (PER_PART, lanes.shape[0] // PER_PART))
    tl.store(groups + part * PER_PART + tl.arange(0, PER_PART), tl.max(runs, axis=1))


@triton.jit(do_not_specialize=["rows", "first_id"])
def scan_peaks(
    logits,
    copies,
    table,
    peaks,
    groups,
    arrivals,
    rows,
    width,
    first_id,
    stride,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """peaks[part, row]: the largest sort keys of the logits and of what is sampled from.

    groups[row, part]: with PER_PART, the largest sort keys of that many groups of the latter.
    arrivals[row]: cleared for `weigh_rows`.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        tl.store(arrivals + row, 0)
    # 1. the logits as they are
    copy = tl.load(table + row * ROW_FIELDS + COPY)
    lanes = lane_peaks(logits + row.to(tl.int64) * stride, part, width, first_id, SPAN, BLOCK)
    best = tl.max(lanes, axis=0)
    out = peaks + (part * rows + row) * PEAK_FIELDS
    tl.store(out + LOGITS_PEAK, best)
    # 2. the row's copy, where it has one
    if copy >= 0:
        lanes = lane_peaks(copies + copy * width, part, width, first_id, SPAN, BLOCK)
        best = tl.max(lanes, axis=0)
    tl.store(out + SAMPLED_PEAK, best)
    # 3. groups of what is sampled from
    if PER_PART > 0:
        mine = groups + row.to(tl.int64) * (tl.num_programs(1) * PER_PART)
        store_groups(mine, lanes, part, PER_PART)


@triton.jit
def scan_groups(
    logits,
    groups,
    width,
    stride,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """groups[row, part] of whole rows; program (row, part)."""
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    lanes = lane_peaks(logits + row.to(tl.int64) * stride, part, width, 0, SPAN, BLOCK)
    mine = groups + row.to(tl.int64) * (tl.num_programs(1) * PER_PART)
    store_groups(mine, lanes, part, PER_PART)
