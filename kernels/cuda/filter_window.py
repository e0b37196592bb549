"""Bounds of top-k and top-p on many rows, from counts, one short list, and exact integers.

The bound is the smallest order that is kept, as `sampling.find_bounds` defines it. It is found so:

    bucket(x) = 16 a unit up to 12 below the row's largest, then one a unit up to 75; the last holds
                the rest. Monotone, so buckets are runs of the total order.
    count     ids a bucket, by `tl.histogram`, and the whole mass
    choose    a window of buckets that holds the bound: for top-k from the counts; for top-p where
              the counts times the bucket's weight put it (a guess, checked below)
    collect   the window's orders, in any order, and the exact mass above the window
    bound     the exact bound, by bits, among the collected; top-p after top-k if the window begins
              at the top

A guess proves wrong when the mass above already reaches the threshold, or does not with the window;
such rows, and those whose window holds over CAPACITY ids (ties), are left to `bound_rows`, one
program a row over all ids. Integers all the way: which of the ways was taken cannot be seen.

Fields of a state int64 [F, 8]: first bucket, last bucket (-1: left over), ids above the window,
total mass, ids collected, mass above the window.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.gumbel_scores import scaled
from tpdet.kernels.cuda.log_softmax import fixed_point
from tpdet.kernels.cuda.order_select import order_of
from tpdet.kernels.cuda.row_scan import largest, source, value_of

BUCKETS = 256
"""Few: without shared atomics a histogram's cost grows with them (Triton 3.6 counts by votes)."""
CAPACITY = 4096
STATE = 8


@triton.jit
def bucket_of(x, top, BUCKETS: tl.constexpr):
    """int32 bucket of scaled values below their row's largest."""
    below = top - x
    bucket = tl.where(below < 12.0, below * 16.0, 180.0 + below)
    return tl.minimum(tl.maximum(tl.minimum(bucket, 255.0).to(tl.int32), 0), BUCKETS - 1)


@triton.jit
def threshold_of(numerator, total):
    """ceil(numerator * total / 2^30) in int64."""
    low = total & 1073741823
    return numerator * (total >> 30) + ((numerator * low + 1073741823) >> 30)


@triton.jit
def row_of_slot(
    logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a filtered row: where it starts, temperature, largest scaled value, k, P."""
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields = table + row * FIELDS
    temperature = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
    if WHOLE:
        start = logits + slot.to(tl.int64) * stride
    else:
        start = source(logits, copies, row, tl.load(fields + 9), stride, width)
    top = scaled(value_of(largest(peaks + 1, row, rows, peak_parts, 2, PARTS)), temperature)
    return start, temperature, top, tl.load(fields + 6), tl.load(fields + 7)


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def count_buckets(
    logits, copies, table, peaks, slots, counts, masses, rows, width, stride, peak_parts,
    FIELDS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    """counts[slot, part, bucket] int32 and masses[slot, part] of BLOCK ids; padding in the last."""
    start, temperature, top, _, numerator = row_of_slot(
        logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS, WHOLE
    )
    part = tl.program_id(1)
    here = tl.program_id(0) * tl.num_programs(1) + part
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    found = tl.histogram(bucket_of(x, top, BUCKETS), BUCKETS)
    tl.store(counts + here.to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS), found)
    mass = tl.zeros((), tl.int64)
    if numerator < 1073741824:
        mass = tl.sum(fixed_point(x, top), axis=0)
    tl.store(masses + here, mass)


@triton.jit
def choose_window(
    table, slots, counts, masses, lists, state, vocabulary, parts, FIELDS: tl.constexpr,
    STATE: tl.constexpr, BUCKETS: tl.constexpr, CAPACITY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The window of each filtered row, and an empty list; program (slot,)."""
    slot = tl.program_id(0)
    fields = table + tl.load(slots + slot) * FIELDS
    top_k, numerator = tl.load(fields + 6), tl.load(fields + 7)
    bucket = tl.arange(0, BUCKETS)
    count = tl.zeros((BUCKETS,), tl.int32)
    for part in range(parts):
        at = (slot * parts + part).to(tl.int64) * BUCKETS
        count += tl.load(counts + at + bucket)
    at = tl.arange(0, PARTS)
    total = tl.sum(tl.load(masses + slot * parts + at, mask=at < parts, other=0), axis=0)
    upto = tl.cumsum(count, axis=0)
    by_k = top_k < vocabulary
    by_p = numerator < 1073741824
    if by_k:
        low = tl.sum((upto < top_k).to(tl.int32), axis=0)
        high = low
    else:
        # A bucket weighs about its count times the weight at its middle: a guess, to be checked.
        middle = bucket.to(tl.float32) + 0.5
        below = tl.where(bucket < 192, middle * 0.0625, middle - 180.0)
        weight = (tl.exp2(below * -1.4426950408889634) * 16777216.0).to(tl.int64)
        guess = tl.cumsum(count.to(tl.int64) * weight, axis=0)
        reached = threshold_of(numerator, total) >> 16
        low = tl.maximum(tl.sum((guess < reached).to(tl.int32), axis=0) - 1, 0)
        high = low + 2
    filled = tl.sum((upto <= CAPACITY).to(tl.int32), axis=0) - 1
    from_top = filled >= high
    low = tl.where(from_top, 0, low)
    if not by_k:
        high = tl.where(from_top, filled, high)
    above = tl.sum(tl.where(bucket < low, count, 0), axis=0)
    inside = tl.sum(tl.where((bucket >= low) & (bucket <= high), count, 0), axis=0)
    if (not by_k) & (inside > CAPACITY):
        low += 1
        high = low
        above = tl.sum(tl.where(bucket < low, count, 0), axis=0)
        inside = tl.sum(tl.where(bucket == low, count, 0), axis=0)
    lost = (inside > CAPACITY) | (by_k & ((high > BUCKETS - 2) | (by_p & (low > 0))))
    high = tl.minimum(high, BUCKETS - 2)
    lost = lost | (low > high)
    tl.store(lists + slot * CAPACITY + tl.arange(0, CAPACITY),
             tl.full((CAPACITY,), -4611686018427387904, tl.int64))  # fmt: skip
    out = state + slot * STATE
    tl.store(out, low.to(tl.int64))
    tl.store(out + 1, tl.where(lost, -1, high).to(tl.int64))
    tl.store(out + 2, above.to(tl.int64))
    tl.store(out + 3, total)
    tl.store(out + 4, tl.zeros((), tl.int64))
    tl.store(out + 5, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def collect_window(
    logits, copies, table, peaks, slots, lists, state, rows, width, stride, peak_parts,
    FIELDS: tl.constexpr, STATE: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Appends the window's orders to the row's list; adds the mass above it; program (slot, part).

    The atomics are integers: the list is used as a set.
    """
    slot, part = tl.program_id(0), tl.program_id(1)
    out = state + slot * STATE
    low, high = tl.load(out), tl.load(out + 1)
    if high >= 0:
        start, temperature, top, _, numerator = row_of_slot(
            logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS,
            WHOLE,
        )  # fmt: skip
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        bucket = bucket_of(x, top, BUCKETS)
        inside = ((bucket >= low) & (bucket <= high) & (at < width)).to(tl.int32)
        count = tl.sum(inside, axis=0)
        if count > 0:
            place = tl.atomic_add(out + 4, count.to(tl.int64)) + tl.cumsum(inside, axis=0) - 1
            fits = (inside > 0) & (place < CAPACITY)
            tl.store(lists + slot * CAPACITY + place, order_of(x, at), mask=fits)
        if (numerator < 1073741824) & (low > 0):
            mass = tl.sum(tl.where(bucket < low, fixed_point(x, top), 0), axis=0)
            if mass > 0:
                tl.atomic_add(out + 5, mass)


@triton.jit
def bound_of_list(orders, weights, threshold):
    """The largest order at which the orders from it up weigh `threshold`; -2^53 if none."""
    found = tl.full((), -9007199254740992, tl.int64)
    unit = tl.full((), 4503599627370496, tl.int64)
    for _ in range(27):
        sum1 = tl.sum(tl.where(orders >= found + unit, weights, 0), axis=0)
        sum2 = tl.sum(tl.where(orders >= found + 2 * unit, weights, 0), axis=0)
        sum3 = tl.sum(tl.where(orders >= found + 3 * unit, weights, 0), axis=0)
        reached = (sum1 >= threshold).to(tl.int64) + (sum2 >= threshold).to(tl.int64)
        found += (reached + (sum3 >= threshold).to(tl.int64)) * unit
        unit = unit >> 2
    return found


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def bound_window(
    table, peaks, slots, lists, state, bounds, rows, vocabulary, peak_parts,
    FIELDS: tl.constexpr, STATE: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """bounds[slot] from the list; 2^62 where the row is left over; program (slot,)."""
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields, held = table + row * FIELDS, state + slot * STATE
    top_k, numerator = tl.load(fields + 6), tl.load(fields + 7)
    high, above = tl.load(held + 1), tl.load(held + 2)
    total, mass_above = tl.load(held + 3), tl.load(held + 5)
    bound = tl.full((), 4611686018427387904, tl.int64)
    if high >= 0:
        temperature = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
        top = scaled(value_of(largest(peaks + 1, row, rows, peak_parts, 2, PARTS)), temperature)
        orders = tl.load(lists + slot * CAPACITY + tl.arange(0, CAPACITY))
        listed = orders > -4611686018427387904
        bound = tl.full((), -9007199254740992, tl.int64)
        if top_k < vocabulary:
            bound = bound_of_list(orders, listed.to(tl.int64), top_k - above)
        if numerator < 1073741824:
            weights = tl.where(listed & (orders >= bound), fixed_point(value_of(orders), top), 0)
            inside = tl.sum(weights, axis=0)
            if top_k < vocabulary:
                total = inside
            missing = threshold_of(numerator, total) - mass_above
            if (missing <= 0) | (inside < missing):
                bound = tl.full((), 4611686018427387904, tl.int64)
            else:
                bound = tl.maximum(bound, bound_of_list(orders, weights, missing))
    tl.store(bounds + slot, bound)
