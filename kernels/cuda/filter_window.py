"""Bounds of top-k and top-p on rows that `filter_top` left over: a window of counted buckets.

    bucket(x) = 48 a spread for the first four spreads below the row's largest, then a sixteenth of
                that; the last holds the rest. Monotone, so buckets are runs of the total order.
    count     ids a bucket, by `tl.histogram`
    choose    a window of buckets that holds the bound: for top-k from the counts; for top-p where
              the counts times the bucket's weight put it (a guess, checked below)
    collect   the window's orders, in any order; the exact mass above it, its least and largest key
              and how many ids each part of the row has in it
    bound     the exact bound: among the collected; or, where the window holds more than CAPACITY
              ids of one value, the id at which that value's ids are enough, from the parts' counts

The spread is the row's own (`filter_top`), so flat rows have fine buckets. A guess proves wrong
when the mass above already reaches the threshold, or does not with the window; such rows are left
to `bound_rows`. Integers all the way: which of the ways was taken cannot be seen.

Fields of a state int64 [F, 8]: first bucket, last bucket (-1: left over), ids above the window, ids
collected, mass above the window, least key, largest key.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.filter_row import row_of_slot, threshold_of
from tpdet.kernels.cuda.gumbel_scores import scaled
from tpdet.kernels.cuda.log_softmax import fixed_point
from tpdet.kernels.cuda.order_search import heaviest_bound
from tpdet.kernels.cuda.order_select import order_of
from tpdet.kernels.cuda.row_scan import value_of

BUCKETS = 256
"""Few: without shared atomics a histogram's cost grows with them (Triton 3.6 counts by votes)."""
CAPACITY = 8192
STATE = 8


@triton.jit
def unit_of(spread_bits):
    """Buckets a unit of scaled value, from the bits of a row's spread."""
    spread = spread_bits.to(tl.int32).to(tl.float32, bitcast=True)
    # Without a spread (groups whose largest are tied) the row tells no width: the widest.
    return tl.div_rn(48.0, tl.where((spread > 0.01) & (spread < 6.0), spread, 6.0))


@triton.jit
def bucket_of(x, top, unit, BUCKETS: tl.constexpr):
    """int32 bucket of scaled values below their row's largest."""
    below = (top - x) * unit
    bucket = tl.where(below < 192.0, below, 180.0 + below * 0.0625)
    return tl.minimum(tl.maximum(tl.minimum(bucket, 255.0).to(tl.int32), 0), BUCKETS - 1)


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def count_buckets(
    logits, copies, table, peaks, slots, tops, bounds, counts, rows, width, stride, peak_parts,
    FIELDS: tl.constexpr, TOPS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """counts[slot, bucket] int32, cleared before, of rows left over; program (slot, part)."""
    slot = tl.program_id(0)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        start, temperature, top, _, _ = row_of_slot(
            logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS,
            WHOLE,
        )  # fmt: skip
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        unit = unit_of(tl.load(tops + slot * TOPS + 3))
        found = tl.histogram(bucket_of(x, top, unit, BUCKETS), BUCKETS)
        bucket = tl.arange(0, BUCKETS)
        tl.atomic_add(counts + slot.to(tl.int64) * BUCKETS + bucket, found, mask=found > 0)


@triton.jit
def choose_window(
    table, slots, tops, bounds, counts, state, vocabulary, FIELDS: tl.constexpr,
    TOPS: tl.constexpr, STATE: tl.constexpr, BUCKETS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The window of each row left over, nothing collected yet; program (slot,)."""
    slot = tl.program_id(0)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        fields = table + tl.load(slots + slot) * FIELDS
        top_k, numerator = tl.load(fields + 6), tl.load(fields + 7)
        bucket = tl.arange(0, BUCKETS)
        count = tl.load(counts + slot.to(tl.int64) * BUCKETS + bucket)
        upto = tl.cumsum(count, axis=0)
        by_k = top_k < vocabulary
        by_p = numerator < 1073741824
        if by_k:
            place = tl.sum((upto < top_k).to(tl.int32), axis=0)
            low = place
            high = place
        else:
            # A bucket weighs about its count times the weight at its middle: a guess, to be
            # checked. Its own total is the measure: what all buckets get wrong cancels.
            middle = bucket.to(tl.float32) + 0.5
            middle = tl.where(bucket < 192, middle, middle * 16.0 - 2880.0)
            below = tl.div_rn(middle, unit_of(tl.load(tops + slot * TOPS + 3)))
            weight = (tl.exp2(below * -1.4426950408889634) * 16777216.0).to(tl.int64)
            # The last bucket holds -inf and padding too, so its count tells nothing.
            mass = tl.where(bucket < BUCKETS - 1, count.to(tl.int64) * weight, 0)
            reached = threshold_of(numerator, tl.sum(mass, axis=0))
            guess = tl.cumsum(mass, axis=0)
            place = tl.sum((guess < reached).to(tl.int32), axis=0)
            low = tl.maximum(place - 1, 0)
            high = place + 1
        filled = tl.sum((upto <= CAPACITY).to(tl.int32), axis=0) - 1
        from_top = filled >= high
        low = tl.where(from_top, 0, low)
        if not by_k:
            high = tl.where(from_top, filled, high)
        inside = tl.sum(tl.where((bucket >= low) & (bucket <= high), count, 0), axis=0)
        if (not by_k) & (inside > CAPACITY):
            low = place
            high = place
        above = tl.sum(tl.where(bucket < low, count, 0), axis=0)
        lost = by_k & ((high > BUCKETS - 2) | (by_p & (low > 0)))
        high = tl.minimum(high, BUCKETS - 2)
        out = state + slot * STATE
        tl.store(out, low.to(tl.int64))
        tl.store(out + 1, tl.where(lost | (low > high), -1, high).to(tl.int64))
        tl.store(out + 2, above.to(tl.int64))
        tl.store(out + 3, tl.zeros((), tl.int64))
        tl.store(out + 4, tl.zeros((), tl.int64))
        tl.store(out + 5, tl.full((), 4611686018427387904, tl.int64))
        tl.store(out + 6, tl.full((), -4611686018427387904, tl.int64))


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def collect_window(
    logits, copies, table, peaks, slots, tops, bounds, lists, parts_of, state, rows, width,
    stride, peak_parts, FIELDS: tl.constexpr, TOPS: tl.constexpr, STATE: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Appends the window's orders to the row's list, and tells of it; program (slot, part).

    parts_of[slot, part]: ids of BLOCK in the window. The atomics are integers: no order matters.
    """
    slot, part = tl.program_id(0), tl.program_id(1)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        out = state + slot * STATE
        low, high = tl.load(out), tl.load(out + 1)
        start, temperature, top, _, numerator = row_of_slot(
            logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS,
            WHOLE,
        )  # fmt: skip
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        bucket = bucket_of(x, top, unit_of(tl.load(tops + slot * TOPS + 3)), BUCKETS)
        inside = (bucket >= low) & (bucket <= high) & (at < width)
        order = order_of(x, at)
        count = tl.sum(inside.to(tl.int32), axis=0)
        tl.store(parts_of + slot * tl.num_programs(1) + part, count)
        if count > 0:
            before = tl.atomic_add(out + 3, count.to(tl.int64))
            if before < CAPACITY:
                place = before + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                tl.store(lists + slot.to(tl.int64) * CAPACITY + place, order,
                         mask=inside & (place < CAPACITY))  # fmt: skip
            none = tl.full((BLOCK,), 4611686018427387904, tl.int64)
            tl.atomic_min(out + 5, tl.min(tl.where(inside, order >> 22, none), axis=0))
            tl.atomic_max(out + 6, tl.max(tl.where(inside, order >> 22, -none), axis=0))
        if (numerator < 1073741824) & (low > 0):
            mass = tl.sum(tl.where(bucket < low, fixed_point(x, top), 0), axis=0)
            if mass > 0:
                tl.atomic_add(out + 4, mass)


@triton.jit
def enough_of_run(count, key, top, vocabulary, top_k, numerator, above, mass_above, total):
    """How many ids of one value are kept, of `count` of them; -1 where the window was wrong."""
    value = value_of(key * 4194304)
    weight = fixed_point(value, top)
    kept = count
    if top_k < vocabulary:
        kept = top_k - above
        total = kept * weight  # a window under top-k and top-p begins at the top
    if numerator < 1073741824:
        missing = threshold_of(numerator, total) - mass_above
        wanted = (missing + weight - 1) // tl.maximum(weight, 1)
        kept = tl.minimum(kept, wanted)
        kept = tl.where((missing <= 0) | (weight <= 0) | (wanted > count), -1, kept)
    return kept


@triton.jit
def order_in_run(
    start, width, temperature, key, parts_of, parts, kept, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The order of the kept-th lowest id whose scaled value has `key`."""
    at = tl.arange(0, PARTS)
    count = tl.load(parts_of + at, mask=at < parts, other=0).to(tl.int64)
    upto = tl.cumsum(count, axis=0)
    part = tl.sum(((upto < kept) & (at < parts)).to(tl.int32), axis=0)
    left = kept - tl.sum(tl.where(at < part, count, 0), axis=0)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + ids, mask=ids < width, other=-float("inf")), temperature)
    order = order_of(x, ids)
    equal = ((order >> 22) == key) & (ids < width)
    wanted = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == left)
    return tl.max(tl.where(wanted, order, -9007199254740992), axis=0)


@triton.jit
def bound_of_window(orders, listed, top, vocabulary, top_k, numerator, above, mass_above, total):
    """The smallest kept order, from a window's list; 2^62 where the window was wrong."""
    bound = tl.full((), -9007199254740992, tl.int64)
    if top_k < vocabulary:
        bound = heaviest_bound(orders, listed.to(tl.int64), top_k - above)
    if numerator < 1073741824:
        weights = tl.where(listed & (orders >= bound), fixed_point(value_of(orders), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        missing = threshold_of(numerator, total) - mass_above
        if (missing <= 0) | (inside < missing):
            bound = tl.full((), 4611686018427387904, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(orders, weights, missing))
    return bound


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def bound_window(
    logits, copies, table, peaks, slots, tops, bounds, lists, parts_of, state, rows, width,
    stride, peak_parts, parts, FIELDS: tl.constexpr, TOPS: tl.constexpr, STATE: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
    ROW_PARTS: tl.constexpr,
):  # fmt: skip
    """bounds[slot] from the window; still 2^62 where it was wrong; program (slot,)."""
    slot = tl.program_id(0)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        held = state + slot * STATE
        high, above, count = tl.load(held + 1), tl.load(held + 2), tl.load(held + 3)
        mass_above, least, most = tl.load(held + 4), tl.load(held + 5), tl.load(held + 6)
        total = tl.load(tops + slot * TOPS + 2)
        start, temperature, top, top_k, numerator = row_of_slot(
            logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS,
            WHOLE,
        )  # fmt: skip
        bound = tl.full((), 4611686018427387904, tl.int64)
        if high >= 0:
            if count <= CAPACITY:
                at = tl.arange(0, CAPACITY)
                listed = at < count
                orders = tl.load(lists + slot.to(tl.int64) * CAPACITY + at, mask=listed, other=0)
                bound = bound_of_window(
                    orders, listed, top, width, top_k, numerator, above, mass_above, total
                )
            elif least == most:
                kept = enough_of_run(
                    count, least, top, width, top_k, numerator, above, mass_above, total
                )
                if kept > 0:
                    bound = order_in_run(
                        start, width, temperature, least, parts_of + slot * parts, parts, kept,
                        BLOCK, ROW_PARTS,
                    )  # fmt: skip
        tl.store(bounds + slot * 2, bound)
