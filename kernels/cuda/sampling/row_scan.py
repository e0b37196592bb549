"""The first pass over rows of logits that every sampled row takes: the largest.

`scan_peaks` finds each row's largest order (`sort_keys.py`), with NaN above +inf, so one maximum of
integers tells the maximum, its lowest id and whether the row is fit; beside it, the largest of the
row's copy where bias or penalties made one.

A program takes a part of a row; parts, and ranks that hold parts of the vocabulary, are combined by
integer maxima, which no order changes. Peaks are [parts, R, 2] int64, and a gather of ranks' has
the same form. Ids are the whole vocabulary's.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.sort_keys import order_of

FIELDS = 12
"""int64 values of a row of the table: see `row_table`."""


@triton.jit
def ranked(x, ids):
    """`order_of`, any NaN above everything."""
    nan = tl.full(x.shape, 2147483647, tl.int64) * 4194304 + (4194303 - ids.to(tl.int64))
    return tl.where(x != x, nan, order_of(x, ids))


@triton.jit
def value_of(order):
    """The fp32 value in an order, zeros as +0.0."""
    key = (order >> 22).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(order):
    """The id in an order; -1 where its value is -inf or there is none."""
    return tl.where((order >> 22) > -2139095041, 4194303 - (order & 4194303), -1)


@triton.jit
def is_fit(order):
    """Whether a row's largest is a finite number."""
    key = order >> 22
    return (key > -2139095041) & (key < 2139095040)


@triton.jit
def largest(parts_of, row, rows, parts, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Largest of int64 [parts, rows, WIDTH] at (.., row, 0)."""
    at = tl.arange(0, PARTS)
    none = -4611686018427387904
    return tl.max(tl.load(parts_of + (at * rows + row) * WIDTH, mask=at < parts, other=none), 0)


@triton.jit
def source(logits, copies, row, copy, stride, width):
    """Where a row that is sampled from starts: its copy if it has one."""
    plain = logits + row.to(tl.int64) * stride
    return tl.where(copy >= 0, copies + copy * width, plain)


@triton.jit
def id_of_order(order):
    """The id in an order."""
    return (4194303 - (order & 4194303)).to(tl.int32)


@triton.jit
def lane_peaks(start, part, width, first_id, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order of each lane of SPAN columns: int64 [BLOCK].

    Values are compared, not orders: a lane meets its ids from the lowest, so it keeps the first of
    equal ones (zeros of both signs are equal) and the first NaN.
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
    nothing = tl.full((BLOCK,), -4611686018427387904, tl.int64)
    return tl.where(lane < width, ranked(best, first_id + best_at), nothing)


@triton.jit
def store_groups(groups, lanes, part, PER_PART: tl.constexpr):
    """The largest orders of a part's PER_PART runs of lanes; groups: int64 [parts, PER_PART]."""
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
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """peaks[part, row]: the largest orders of the logits and of what is sampled from.

    groups[row, part]: with PER_PART, the largest orders of that many groups of the latter.
    arrivals[row]: cleared for `weigh_rows`.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        tl.store(arrivals + row, 0)
    copy = tl.load(table + row * FIELDS + 9)
    lanes = lane_peaks(logits + row.to(tl.int64) * stride, part, width, first_id, SPAN, BLOCK)
    best = tl.max(lanes, axis=0)
    out = peaks + (part * rows + row) * 2
    tl.store(out, best)
    if copy >= 0:
        lanes = lane_peaks(copies + copy * width, part, width, first_id, SPAN, BLOCK)
        best = tl.max(lanes, axis=0)
    tl.store(out + 1, best)
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
    """groups[row, part] of whole rows."""
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    lanes = lane_peaks(logits + row.to(tl.int64) * stride, part, width, 0, SPAN, BLOCK)
    mine = groups + row.to(tl.int64) * (tl.num_programs(1) * PER_PART)
    store_groups(mine, lanes, part, PER_PART)
