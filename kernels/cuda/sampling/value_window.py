"""Bounds of top-k and top-p on rows that fall through the candidate list: a window of buckets.

    count     ids a bucket (`value_buckets`), by `tl.histogram`; for top-p alone of a quarter of
              the ids, without the listed candidates: they may be few and most of the mass, but
              their mass is known
    choose    a window of positions that holds the bound: for top-k from the counts; for top-p
              about where the counts times the bucket's weight put it (a guess, checked below); the
              last program that counts a row does
    collect   the window's sort keys, as a set, and the exact mass above it. Where the chosen bucket
              alone holds too many ids, they should be of one value: a run. Of its run and those of
              the nearest values it stores the ids (also by parts of the row) and the least and
              largest value key
    bound     the exact bound: among the collected, or the id at which a run's ids are enough

A guess proves wrong when the mass above already reaches the threshold, or does not with the window.
Such rows fall through to `digit_search`. All sums are of integers: which method found a bound
cannot be seen.

    states   int64 [F, LIST_FIELDS]      of `candidate_list`
    counts   int32 [F, BUCKETS]          windows    int64 [F, WINDOW_FIELDS]
    lists    int64 [F, CAPACITY]         run_parts  int32 [F, RUNS, parts]
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.candidate_list import (
    ARRIVALS,
    FLOOR,
    LIGHT_MASS,
    LIST_FIELDS,
    ROW_MASS,
    SPREAD,
    TOP_VALUE,
)
from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.row_table import BOUND, BOUND_FIELDS, float_bits, load_float
from tpdet.kernels.cuda.sampling.sort_keys import (
    ABOVE_ALL,
    BELOW_ALL,
    least_key,
    sort_key,
    value_key_of,
    value_of,
)
from tpdet.kernels.cuda.sampling.tied_runs import (
    RUN_FIELDS,
    RUN_IDS,
    RUN_LEAST,
    RUN_MOST,
    RUNS,
)
from tpdet.kernels.cuda.sampling.value_buckets import (
    BUCKETS,
    bucket_at,
    bucket_of_mass,
    held_between,
    position_of,
    unit_of,
    window_about,
)

CAPACITY = tl.constexpr(8192)
ROOM = tl.constexpr(6144)
"""Ids that a guessed window should hold, at most: their number is a guess too."""

# Fields of a row's window, int64 [WINDOW_FIELDS]
LOW = tl.constexpr(0)  # fp32 bits of the first position
HIGH = tl.constexpr(1)  # fp32 bits of the position after the last; -1: the row falls through
IDS_ABOVE = tl.constexpr(2)  # of top-k, ids above the window
COLLECTED = tl.constexpr(3)  # ids collected
MASS_ABOVE = tl.constexpr(4)  # mass above the window
MIDDLE = tl.constexpr(5)  # bucket of the middle run; -1: sort keys are listed
FIRST_RUN = tl.constexpr(6)  # from here on the runs: [RUNS, RUN_FIELDS] of `tied_runs`
WINDOW_FIELDS = tl.constexpr(16)


@triton.jit
def counted(start, at, width, temperature, top, unit, cut):
    """How many of the columns `at` of a row are in each bucket: int32 [BUCKETS].

    Values from `cut` up are in the last bucket.
    """
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    bucket = bucket_at(position_of(x, top, unit))
    return tl.histogram(tl.where(x < cut, bucket, BUCKETS - 1), BUCKETS)


@triton.jit
def window_of_mass(state, count, bucket, numerator):
    """(first position, the one after the last, middle run or -1) of the window of top-p alone.

    state: a row's of `candidate_list`. The mass of what is listed is known: the guess is of the
    rest.
    """
    # 1. the missing mass
    total, unit = tl.load(state + ROW_MASS), unit_of(tl.load(state + SPREAD))
    top = load_float(state + TOP_VALUE)
    known = tl.load(state + LIGHT_MASS)
    floor = tl.zeros((), tl.float32)
    if known >= 0:
        floor = position_of(value_of(tl.load(state + FLOOR)), top, unit)
    known = tl.maximum(known, 0)
    missing = threshold_of(numerator, total) - known
    # 2. a window about the bucket in which it seems to be reached
    chosen = bucket_of_mass(count, bucket, missing, total - known, unit)
    low, high = window_about(count, bucket, chosen, floor, ROOM)
    middle = tl.full((), -1, tl.int32)
    # 3. where that bucket holds more ids than can be listed: its run, and the runs beside it
    if held_between(count, bucket, chosen, chosen) > CAPACITY:
        middle = chosen
        first = tl.max(tl.where((bucket < chosen) & (count > 0), bucket, -1), axis=0)
        last = tl.min(tl.where((bucket > chosen) & (count > 0), bucket, BUCKETS), axis=0)
        low = tl.where(first < 0, chosen, first).to(tl.float32)
        high = tl.where(last > BUCKETS - 2, chosen, last).to(tl.float32) + 1.0
    return low, high, middle


@triton.jit
def choose_window(top_k, numerator, state, counts, window, vocabulary):
    """Stores the window of a row that falls through, nothing collected yet.

    state: the row's of `candidate_list`; counts: its buckets, which other programs added to.
    """
    bucket = tl.arange(0, BUCKETS)
    count = tl.load(counts + bucket, cache_modifier=".cg")  # atomics pass by the L1 cache
    above = tl.zeros((), tl.int32)
    if top_k < vocabulary:
        # of top-k: all buckets up to the one that reaches k, or that one alone
        last = tl.sum((tl.cumsum(count, axis=0) < top_k).to(tl.int32), axis=0)
        first = last
        if held_between(count, bucket, 0, last) <= CAPACITY:
            first = tl.zeros((), tl.int32)
        above = held_between(count, bucket, 0, first - 1)
        runs = held_between(count, bucket, first, last) > CAPACITY
        middle = tl.where(runs, last, -1)
        lost = (last > BUCKETS - 2) | ((numerator < TOP_P_OFF) & (first > 0))
        low, high = first.to(tl.float32), tl.where(lost, -1, last + 1).to(tl.float32)
    else:
        low, high, middle = window_of_mass(state, count, bucket, numerator)
    tl.store(window + LOW, float_bits(low))
    tl.store(window + HIGH, float_bits(high))
    tl.store(window + IDS_ABOVE, above.to(tl.int64))
    tl.store(window + COLLECTED, tl.zeros((), tl.int64))
    tl.store(window + MASS_ABOVE, tl.zeros((), tl.int64))
    tl.store(window + MIDDLE, middle.to(tl.int64))
    for run in tl.static_range(RUNS):
        empty = window + FIRST_RUN + RUN_FIELDS * run
        tl.store(empty + RUN_IDS, tl.zeros((), tl.int64))
        tl.store(empty + RUN_LEAST, tl.full((), ABOVE_ALL, tl.int64))
        tl.store(empty + RUN_MOST, tl.full((), BELOW_ALL, tl.int64))


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def count_buckets(
    logits,
    copies,
    table,
    peaks,
    slots,
    states,
    bounds,
    counts,
    windows,
    rows,
    width,
    stride,
    peak_parts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Counts and chooses the window of each row that falls through; program (slot, part).

    counts[slot] and the arrivals in the row's state are zero before; a row's last program chooses.
    Of rows without top-k, which need no exact counts, a quarter of the ids count four times, and
    the listed candidates not at all.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    if tl.load(bounds + slot * BOUND_FIELDS + BOUND) == ABOVE_ALL:
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
            PARTS,
            WHOLE,
        )
        # 1. values from the floor up are not counted where their mass is known
        state = states + slot * LIST_FIELDS
        unit = unit_of(tl.load(state + SPREAD))
        cut = tl.full((), float("inf"), tl.float32)
        if tl.load(state + LIGHT_MASS) >= 0:
            cut = value_of(tl.load(state + FLOOR))
        # 2. count
        first, bucket = tl.program_id(1) * BLOCK, tl.arange(0, BUCKETS)
        if top_k < width:
            every = first + tl.arange(0, BLOCK)
            found = counted(start, every, width, temperature, top, unit, cut)
        else:
            # Ids near each other are alike, so one sector (32 ids) of each run of 128 is read.
            lane = tl.arange(0, BLOCK // 4)
            some = first + lane // 32 * 128 + lane % 32
            found = counted(start, some, width, temperature, top, unit, cut) * 4
        mine = counts + slot.to(tl.int64) * BUCKETS
        tl.atomic_add(mine + bucket, found, mask=found > 0, sem="relaxed")
        tl.debug_barrier()  # all of this program's counts come before its arrival
        # 3. the last program chooses the window
        if tl.atomic_add(state + ARRIVALS, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            choose_window(top_k, numerator, state, mine, windows + slot * WINDOW_FIELDS, width)


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def collect_window(
    logits,
    copies,
    table,
    peaks,
    slots,
    states,
    bounds,
    lists,
    run_parts,
    windows,
    rows,
    width,
    stride,
    peak_parts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Lists the window's sort keys, or counts its runs; adds the mass above; program (slot, part).

    run_parts[slot, run, part]: ids of each run in BLOCK. The atomics are integers, and the list is
    used as a set: how programs take turns is free.
    """
    await_earlier(DEPENDENT)
    slot, part = tl.program_id(0), tl.program_id(1)
    if tl.load(bounds + slot * BOUND_FIELDS + BOUND) == ABOVE_ALL:
        window = windows + slot * WINDOW_FIELDS
        low = load_float(window + LOW)
        high = load_float(window + HIGH)
        middle = tl.load(window + MIDDLE)
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
            PARTS,
            WHOLE,
        )
        # 1. which of these columns are in the window
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
        unit = unit_of(tl.load(states + slot * LIST_FIELDS + SPREAD))
        position = position_of(x, top, unit)
        inside = (position >= low) & (position < high) & (at < width)
        # 2. their sort keys, or their runs
        if middle < 0:
            count = tl.sum(inside.to(tl.int32), axis=0)
            if count > 0:
                before = tl.atomic_add(window + COLLECTED, count.to(tl.int64))
                if before < CAPACITY:
                    place = before + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                    tl.store(
                        lists + slot.to(tl.int64) * CAPACITY + place,
                        sort_key(x, at),
                        mask=inside & (place < CAPACITY),
                    )
        else:
            parts = tl.num_programs(1)
            bucket = bucket_at(position)
            for run in tl.static_range(RUNS):
                mine = inside & (((bucket > middle).to(tl.int32) - (bucket < middle)) == run - 1)
                count = tl.sum(mine.to(tl.int32), axis=0)
                tl.store(run_parts + (slot * RUNS + run) * parts + part, count)
                if count > 0:
                    least = tl.min(tl.where(mine, x, float("inf")), axis=0)
                    most = tl.max(tl.where(mine, x, -float("inf")), axis=0)
                    found = window + FIRST_RUN + RUN_FIELDS * run
                    tl.atomic_add(found + RUN_IDS, count.to(tl.int64))
                    tl.atomic_min(found + RUN_LEAST, value_key_of(least_key(least)))
                    tl.atomic_max(found + RUN_MOST, value_key_of(least_key(most)))
        # 3. the mass above the window
        if (numerator < TOP_P_OFF) & (low > 0):
            mass = tl.sum(tl.where(position < low, fixed_point(x, top), 0), axis=0)
            if mass > 0:
                tl.atomic_add(window + MASS_ABOVE, mass)
