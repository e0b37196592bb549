"""Bounds of top-k and top-p on rows that fall through `filter_top`: a window of counted buckets.

    count     ids a bucket (`filter_buckets`), by `tl.histogram`; for top-p alone of a quarter of
              the ids, without those that `filter_top` listed: they may be few and most of the
              mass, but theirs is known
    choose    a window of positions that holds the bound: for top-k from the counts; for top-p
              about where the counts times the bucket's weight put it (a guess, checked below); the
              last program that counts a row does
    collect   the window's orders, in any order, and the exact mass above it. Where the place alone
              holds too many ids, they should be of one value: a run. Of its run and those of the
              nearest values it tells the ids (also by parts of the row) and least and largest key
    bound     the exact bound: among the collected, or the id at which a run's ids are enough

The spread is the row's own (`filter_top`), so flat rows have fine buckets. A guess proves wrong
when the mass above already reaches the threshold, or does not with the window; such rows are left
to `filter_digits`. Integers all the way: which of the ways was taken cannot be seen.

Fields of a state int64 [F, 16]: bits of the first position and of the one after the last (-1: left
over), of top-k ids above the window,
ids collected, mass above the window, bucket of the middle run (-1: orders are listed), then of
three runs each: ids, least key, largest key.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.filter_buckets import (
    bucket_at,
    held_between,
    place_by_mass,
    position_of,
    unit_of,
    window_about,
)
from tpdet.kernels.cuda.sampling.filter_row import row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import value_of
from tpdet.kernels.cuda.sampling.sort_key_search import least_order
from tpdet.kernels.cuda.sampling.sort_keys import order_of

CAPACITY = 8192
ROOM = 6144
"""Ids that a guessed window should hold, at most: their number is a guess too."""
STATE = 16


@triton.jit
def counted(start, at, width, temperature, top, unit, cut, BUCKETS: tl.constexpr):
    """Of these columns of a row, how many are in each bucket: int32 [BUCKETS].

    Values from `cut` up are in the last one.
    """
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    bucket = bucket_at(position_of(x, top, unit, BUCKETS), BUCKETS)
    return tl.histogram(tl.where(x < cut, bucket, BUCKETS - 1), BUCKETS)


@triton.jit
def window_of_mass(
    tops,
    count,
    bucket,
    numerator,
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """(first position, the one after the last, middle run or -1) of the window of top-p alone.

    tops: a row's state of `filter_top`. What it has listed is known: the guess is of the rest.
    """
    total, unit = tl.load(tops + 2), unit_of(tl.load(tops + 3))
    largest = tl.load(tops + 5).to(tl.int32).to(tl.float32, bitcast=True)
    known = tl.load(tops + 6)
    floor = tl.zeros((), tl.float32)
    if known >= 0:
        floor = position_of(value_of(tl.load(tops)), largest, unit, BUCKETS)
    known = tl.maximum(known, 0)
    missing = threshold_of(numerator, total) - known
    place = place_by_mass(count, bucket, missing, total - known, unit, BUCKETS)
    low, high = window_about(count, bucket, place, floor, ROOM, BUCKETS)
    middle = tl.full((), -1, tl.int32)
    if held_between(count, bucket, place, place) > CAPACITY:
        # So many ids so near each other: a value's run, and those beside it.
        middle = place
        first = tl.max(tl.where((bucket < place) & (count > 0), bucket, -1), axis=0)
        last = tl.min(tl.where((bucket > place) & (count > 0), bucket, BUCKETS), axis=0)
        low = tl.where(first < 0, place, first).to(tl.float32)
        high = tl.where(last > BUCKETS - 2, place, last).to(tl.float32) + 1.0
    return low, high, middle


@triton.jit
def choose_window(
    top_k,
    numerator,
    tops,
    counts,
    state,
    vocabulary,
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The window of a row that falls through into its `state`, nothing collected yet.

    tops: the row's state of `filter_top`; counts: its buckets, which other programs added to.
    """
    bucket = tl.arange(0, BUCKETS)
    count = tl.load(counts + bucket, cache_modifier=".cg")  # atomics pass by the L1 cache
    above = tl.zeros((), tl.int32)
    if top_k < vocabulary:
        place = tl.sum((tl.cumsum(count, axis=0) < top_k).to(tl.int32), axis=0)
        first = place
        if held_between(count, bucket, 0, place) <= CAPACITY:
            first = tl.zeros((), tl.int32)
        above = held_between(count, bucket, 0, first - 1)
        runs = held_between(count, bucket, first, place) > CAPACITY
        middle = tl.where(runs, place, -1)
        lost = (place > BUCKETS - 2) | ((numerator < 1073741824) & (first > 0))
        low, high = first.to(tl.float32), tl.where(lost, -1, place + 1).to(tl.float32)
    else:
        low, high, middle = window_of_mass(tops, count, bucket, numerator, BUCKETS, ROOM, CAPACITY)
    tl.store(state, low.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(state + 1, high.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(state + 2, above.to(tl.int64))
    tl.store(state + 3, tl.zeros((), tl.int64))
    tl.store(state + 4, tl.zeros((), tl.int64))
    tl.store(state + 5, middle.to(tl.int64))
    for run in tl.static_range(3):
        tl.store(state + 6 + 3 * run, tl.zeros((), tl.int64))
        tl.store(state + 7 + 3 * run, tl.full((), 4611686018427387904, tl.int64))
        tl.store(state + 8 + 3 * run, tl.full((), -4611686018427387904, tl.int64))


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def count_buckets(
    logits,
    copies,
    table,
    peaks,
    slots,
    tops,
    bounds,
    counts,
    state,
    rows,
    width,
    stride,
    peak_parts,
    FIELDS: tl.constexpr,
    TOPS: tl.constexpr,
    STATE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Counts and chooses the window of each row that falls through; program (slot, part).

    counts[slot, bucket] int32, and the arrivals in the row's `tops`, are cleared before; a row's
    last program chooses. Of rows without top-k, which need no exact counts, a quarter of the ids
    count four times: those that `filter_top` has listed not at all.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        start, temperature, top, top_k, numerator = row_of_slot(
            logits,
            copies,
            table,
            peaks,
            slots,
            rows,
            width,
            stride,
            peak_parts,
            FIELDS,
            PARTS,
            WHOLE,
        )
        held = tops + slot * TOPS
        unit = unit_of(tl.load(held + 3))
        cut = tl.full((), float("inf"), tl.float32)
        if tl.load(held + 6) >= 0:
            cut = value_of(tl.load(held))
        first, bucket = tl.program_id(1) * BLOCK, tl.arange(0, BUCKETS)
        if top_k < width:
            every = first + tl.arange(0, BLOCK)
            found = counted(start, every, width, temperature, top, unit, cut, BUCKETS)
        else:
            # Ids near each other are alike, so that each run of 128 is asked: for a sector of it.
            lane = tl.arange(0, BLOCK // 4)
            some = first + lane // 32 * 128 + lane % 32
            found = counted(start, some, width, temperature, top, unit, cut, BUCKETS) * 4
        mine = counts + slot.to(tl.int64) * BUCKETS
        tl.atomic_add(mine + bucket, found, mask=found > 0, sem="relaxed")
        tl.debug_barrier()  # all of this program's counts come before its arrival
        if tl.atomic_add(held + 7, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            choose_window(
                top_k, numerator, held, mine, state + slot * STATE, width, BUCKETS, ROOM, CAPACITY
            )


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def collect_window(
    logits,
    copies,
    table,
    peaks,
    slots,
    tops,
    bounds,
    lists,
    parts_of,
    state,
    rows,
    width,
    stride,
    peak_parts,
    FIELDS: tl.constexpr,
    TOPS: tl.constexpr,
    STATE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Lists the window's orders, or tells of its runs; adds the mass above; program (slot, part).

    parts_of[slot, run, part]: ids of each run in BLOCK. The atomics are integers: no order matters.
    """
    await_earlier(DEPENDENT)
    slot, part = tl.program_id(0), tl.program_id(1)
    if tl.load(bounds + slot * 2) == 4611686018427387904:
        out = state + slot * STATE
        low = tl.load(out).to(tl.int32).to(tl.float32, bitcast=True)
        high = tl.load(out + 1).to(tl.int32).to(tl.float32, bitcast=True)
        middle = tl.load(out + 5)
        start, temperature, top, _, numerator = row_of_slot(
            logits,
            copies,
            table,
            peaks,
            slots,
            rows,
            width,
            stride,
            peak_parts,
            FIELDS,
            PARTS,
            WHOLE,
        )
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        position = position_of(x, top, unit_of(tl.load(tops + slot * TOPS + 3)), BUCKETS)
        inside = (position >= low) & (position < high) & (at < width)
        if middle < 0:
            count = tl.sum(inside.to(tl.int32), axis=0)
            if count > 0:
                before = tl.atomic_add(out + 3, count.to(tl.int64))
                if before < CAPACITY:
                    place = before + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                    tl.store(
                        lists + slot.to(tl.int64) * CAPACITY + place,
                        order_of(x, at),
                        mask=inside & (place < CAPACITY),
                    )
        else:
            parts = tl.num_programs(1)
            bucket = bucket_at(position, BUCKETS)
            for run in tl.static_range(3):
                mine = inside & (((bucket > middle).to(tl.int32) - (bucket < middle)) == run - 1)
                count = tl.sum(mine.to(tl.int32), axis=0)
                tl.store(parts_of + (slot * 3 + run) * parts + part, count)
                if count > 0:
                    least = tl.min(tl.where(mine, x, float("inf")), axis=0)
                    most = tl.max(tl.where(mine, x, -float("inf")), axis=0)
                    tl.atomic_add(out + 6 + 3 * run, count.to(tl.int64))
                    tl.atomic_min(out + 7 + 3 * run, least_order(least) >> 22)
                    tl.atomic_max(out + 8 + 3 * run, least_order(most) >> 22)
        if (numerator < 1073741824) & (low > 0):
            mass = tl.sum(tl.where(position < low, fixed_point(x, top), 0), axis=0)
            if mass > 0:
                tl.atomic_add(out + 4, mass)
