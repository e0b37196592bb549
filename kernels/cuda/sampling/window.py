"""Bounds of top-k and top-p on rows that fall through the candidate list: a window of buckets.

    position(x) = 48 a spread for the first four spreads below the row's largest, then a sixteenth
                  of that; the last bucket holds the rest
    bucket(x)   = the integer part

Both are monotone, so buckets, and windows between two positions, are runs of sort keys. The spread
is measured for each row (`candidates.py`), so flat rows have fine buckets.

    count     ids a bucket, by `tl.histogram`; for top-p alone of a quarter of the ids, without the
              listed candidates: they may be few and most of the mass, but their mass is known
    choose    a window of positions that holds the bound: for top-k from the counts; for top-p
              about where the counts times the bucket's weight put it (a guess in floating point,
              checked below); the last program that counts a row does
    collect   the window's sort keys, as a set, and the exact mass above it. Where the chosen bucket
              alone holds too many ids, they should be of one value: a run. Of its run and those of
              the nearest values it stores the ids (also by parts of the row) and the least and
              largest value key
    bound     the exact bound: among the collected, or the id at which a run's ids are enough: they
              weigh alike, so a division says how many of the lowest are kept

For example top-k of 20,000 where buckets 0, 1, 2 .. hold 9,000, 8,000, 7,000 ids: bucket 2 reaches
k. Buckets 0 to 2 hold more than can be listed, so the window is bucket 2 alone, 17,000 ids are
above it, and the bound is the 3,000th sort key of its list. Were its 7,000 ids more than can be
listed and of one value, the bound would be the 3,000th lowest of them, found without a list.

A guess proves wrong when the mass above already reaches the threshold, or does not with the window.
Such rows fall through to the search by digits. All sums are of integers: which method found a bound
cannot be seen.

    states   int64 [F, LIST_FIELDS]      of `candidates.py`
    counts   int32 [F, BUCKETS]          windows    int64 [F, WINDOW_FIELDS]
    lists    int64 [F, CAPACITY]         run_parts  int32 [F, RUNS, parts]
    count, bucket  int [BUCKETS]         ids counted in each bucket, and the numbers of the buckets
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.candidates import (
    ARRIVALS,
    BUCKETS,
    FLOOR,
    LIGHT_MASS,
    LIST_FIELDS,
    ROW_MASS,
    SPREAD,
    TOP_VALUE,
    append_keys,
    bound_of_list,
    filtered_row,
)
from tpdet.kernels.cuda.sampling.noise import LOG2_E, fixed_point
from tpdet.kernels.cuda.sampling.peaks import scaled
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BELOW_ALL,
    BOUND,
    BOUND_FIELDS,
    KEEPS_ALL,
    KEYS_PER_VALUE,
    TOP_P_OFF,
    float_bits,
    least_key,
    load_float,
    sort_key,
    threshold_of,
    value_key_of,
    value_of,
)

CAPACITY = tl.constexpr(8192)
WINDOW_BLOCK = tl.constexpr(4096)
"""Columns of a row that a program collects from."""
COUNT_BLOCK = tl.constexpr(8192)
"""Columns of a row that a program counts."""
ROOM = tl.constexpr(6144)
"""Ids that a guessed window should hold, at most: their number is a guess too."""

# Fields of a row's window, int64 [WINDOW_FIELDS]
LOW = tl.constexpr(0)  # fp32 bits of the first position
HIGH = tl.constexpr(1)  # fp32 bits of the position after the last; -1: the row falls through
IDS_ABOVE = tl.constexpr(2)  # of top-k, ids above the window
COLLECTED = tl.constexpr(3)  # ids collected
MASS_ABOVE = tl.constexpr(4)  # mass above the window
MIDDLE = tl.constexpr(5)  # bucket of the middle run; -1: sort keys are listed
FIRST_RUN = tl.constexpr(6)  # from here on the runs: [RUNS, RUN_FIELDS], the largest value first
WINDOW_FIELDS = tl.constexpr(16)

RUNS = tl.constexpr(3)
RUN_IDS = tl.constexpr(0)
RUN_LEAST = tl.constexpr(1)  # the least and the largest value key: they differ in a wrong guess
RUN_MOST = tl.constexpr(2)
RUN_FIELDS = tl.constexpr(3)

_PER_SPREAD = tl.constexpr(48.0)
_FINE = tl.constexpr(192)  # buckets of four spreads
_COARSE_FACTOR = tl.constexpr(16.0)  # how many times wider the buckets after them are
_COARSE_FROM = tl.constexpr(180.0)  # 192 - 192 / 16: where the coarse buckets would begin at 0
_LEAST_SPREAD, _MOST_SPREAD = tl.constexpr(0.01), tl.constexpr(6.0)
_WEIGHT_UNITS = tl.constexpr(2.0**24)  # a weight of 1 as an integer


class WindowRoom(NamedTuple):
    """Memory of F rows' windows, written by `count_buckets` and `collect_window`."""

    windows: torch.Tensor
    """int64 [F, WINDOW_FIELDS]."""
    lists: torch.Tensor
    """int64 [F, CAPACITY]."""
    run_parts: torch.Tensor
    """int32 [F, RUNS, parts]."""


@triton.jit
def unit_of(spread_bits):
    """Buckets a unit of scaled value, from the bits of a row's spread."""
    spread = spread_bits.to(tl.int32).to(tl.float32, bitcast=True)
    # Without a spread (groups whose largest are tied) the width is unknown: the widest is taken.
    known = (spread > _LEAST_SPREAD) & (spread < _MOST_SPREAD)
    return tl.div_rn(_PER_SPREAD, tl.where(known, spread, _MOST_SPREAD))


@triton.jit
def position_of(x, top, unit):
    """fp32 position of scaled values below their row's largest; its integer part is the bucket."""
    below = (top - x) * unit
    below = tl.where(below < _FINE, below, below * (1.0 / _COARSE_FACTOR) + _COARSE_FROM)
    return tl.minimum(tl.maximum(below, 0.0), BUCKETS - 1.0)


@triton.jit
def bucket_at(position):
    """int32 bucket of a position, held in [0, BUCKETS)."""
    return tl.minimum(tl.maximum(position.to(tl.int32), 0), BUCKETS - 1)


@triton.jit
def ids_between(count, bucket, low, high):
    """Ids counted in the buckets from low to high."""
    return tl.sum(tl.where((bucket >= low) & (bucket <= high), count, 0), axis=0)


@triton.jit
def bucket_of_mass(count, bucket, missing, rest, unit):
    """The bucket at whose end `missing` of the mass `rest` seems to lie: a guess, to be checked.

    rest, missing: int64, of the ids that are counted. A bucket weighs about its count times the
    weight at its middle. Its share of all buckets is what counts: an error common to all cancels.
    """
    # 1. the weight at the middle of each bucket
    middle = bucket.to(tl.float32) + 0.5
    middle = tl.where(
        bucket < _FINE, middle, middle * _COARSE_FACTOR - _COARSE_FROM * _COARSE_FACTOR
    )
    weight = (tl.exp2(tl.div_rn(middle, unit) * -LOG2_E) * _WEIGHT_UNITS).to(tl.int64)
    # 2. masses; the last bucket holds -inf, padding and listed ids too, so its count says nothing
    mass = tl.where(bucket < BUCKETS - 1, count.to(tl.int64) * weight, 0)
    # 3. the first bucket up to which the masses reach the missing share
    share = tl.div_rn(missing.to(tl.float32), tl.maximum(rest, 1).to(tl.float32))
    numerator = (tl.minimum(tl.maximum(share, 0.0), 1.0) * (TOP_P_OFF * 1.0)).to(tl.int64)
    reached = threshold_of(numerator, tl.sum(mass, axis=0))
    chosen = tl.sum((tl.cumsum(mass, axis=0) < reached).to(tl.int32), axis=0)
    return tl.minimum(chosen, BUCKETS - 2)


@triton.jit
def position_after(count, upto, bucket, wanted):
    """The position above which `wanted` ids are, if the ids of a bucket spread evenly in it."""
    there = tl.minimum(tl.sum((upto <= wanted).to(tl.int32), axis=0), BUCKETS - 1)
    inside = ids_between(count, bucket, there, there)
    over = wanted - ids_between(count, bucket, 0, there - 1)
    within = tl.div_rn(over.to(tl.float32), tl.maximum(inside, 1).to(tl.float32))
    position = there.to(tl.float32) + tl.minimum(tl.maximum(within, 0.0), 1.0)
    return tl.minimum(position, BUCKETS - 1.0)


@triton.jit
def window_about(count, bucket, chosen, floor, ROOM: tl.constexpr):
    """(first position, the one after the last) of a bucket and as many ids beside it as fit.

    floor: the first position that may be taken. Where a neighbour is empty, values are tied and do
    not spread: then no bucket is cut.
    """
    # 1. how many ids fit on each side of the chosen bucket
    upto = tl.cumsum(count, axis=0)
    most = ids_between(count, bucket, 0, BUCKETS - 2)
    after = ids_between(count, bucket, 0, chosen)
    before = after - ids_between(count, bucket, chosen, chosen)
    beside = tl.maximum(ROOM - (after - before), 0) // 2
    apart = (ids_between(count, bucket, chosen - 1, chosen - 1) == 0) | (
        ids_between(count, bucket, chosen + 1, chosen + 1) == 0
    )
    # 2. the ends that hold them
    low = position_after(count, upto, bucket, before - beside)
    low = tl.minimum(tl.where(apart, tl.ceil(low), low), chosen.to(tl.float32))
    low = tl.where(before <= beside, floor, low)
    high = position_after(count, upto, bucket, after + beside)
    high = tl.maximum(tl.where(apart, tl.floor(high), high), chosen.to(tl.float32) + 1.0)
    return low, tl.where(after + beside >= most, BUCKETS - 1.0, high)


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

    state: a row's of `candidates.py`. The mass of what is listed is known: the guess is of the
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
    if ids_between(count, bucket, chosen, chosen) > CAPACITY:
        middle = chosen
        first = tl.max(tl.where((bucket < chosen) & (count > 0), bucket, -1), axis=0)
        last = tl.min(tl.where((bucket > chosen) & (count > 0), bucket, BUCKETS), axis=0)
        low = tl.where(first < 0, chosen, first).to(tl.float32)
        high = tl.where(last > BUCKETS - 2, chosen, last).to(tl.float32) + 1.0
    return low, high, middle


@triton.jit
def choose_window(top_k, numerator, state, counts, window, vocabulary):
    """Stores the window of a row that falls through, nothing collected yet.

    state: the row's of `candidates.py`; counts: its buckets, which other programs added to.
    """
    bucket = tl.arange(0, BUCKETS)
    count = tl.load(counts + bucket, cache_modifier=".cg")  # atomics pass by the L1 cache
    above = tl.zeros((), tl.int32)
    if top_k < vocabulary:
        # of top-k: all buckets up to the one that reaches k, or that one alone
        last = tl.sum((tl.cumsum(count, axis=0) < top_k).to(tl.int32), axis=0)
        first = last
        if ids_between(count, bucket, 0, last) <= CAPACITY:
            first = tl.zeros((), tl.int32)
        above = ids_between(count, bucket, 0, first - 1)
        runs = ids_between(count, bucket, first, last) > CAPACITY
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


@triton.jit
def count_buckets(
    rows, filters, shape, counts, windows, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Counts and chooses the window of each row that falls through; program (slot, part).

    counts[slot] and the arrivals in the row's state are zero before; a row's last program chooses.
    Of rows without top-k, which need no exact counts, a quarter of the ids count four times, and
    the listed candidates not at all.
    """
    await_earlier(DEPENDENT)
    slot, width = tl.program_id(0), shape.width
    if tl.load(filters.bounds + slot * BOUND_FIELDS + BOUND) == ABOVE_ALL:
        start, temperature, top, top_k, numerator = filtered_row(rows, filters.states, shape, WHOLE)
        # 1. values from the floor up are not counted where their mass is known
        state = filters.states + slot * LIST_FIELDS
        unit = unit_of(tl.load(state + SPREAD))
        cut = tl.full((), float("inf"), tl.float32)
        if tl.load(state + LIGHT_MASS) >= 0:
            cut = value_of(tl.load(state + FLOOR))
        # 2. count
        first, bucket = tl.program_id(1) * COUNT_BLOCK, tl.arange(0, BUCKETS)
        if top_k < width:
            every = first + tl.arange(0, COUNT_BLOCK)
            ids = counted(start, every, width, temperature, top, unit, cut)
        else:
            # Ids near each other are alike, so one sector (32 ids) of each run of 128 is read.
            lane = tl.arange(0, COUNT_BLOCK // 4)
            some = first + lane // 32 * 128 + lane % 32
            ids = counted(start, some, width, temperature, top, unit, cut) * 4
        row_counts = counts + slot.to(tl.int64) * BUCKETS
        tl.atomic_add(row_counts + bucket, ids, mask=ids > 0, sem="relaxed")
        tl.debug_barrier()  # all of this program's counts come before its arrival
        # 3. the last program chooses the window
        if tl.atomic_add(state + ARRIVALS, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            window = windows + slot * WINDOW_FIELDS
            choose_window(top_k, numerator, state, row_counts, window, width)


@triton.jit
def collect_window(rows, filters, shape, room, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Lists the window's sort keys, or counts its runs; adds the mass above; program (slot, part).

    room.run_parts[slot, run, part]: ids of each run in WINDOW_BLOCK.
    """
    await_earlier(DEPENDENT)
    slot, part = tl.program_id(0), tl.program_id(1)
    if tl.load(filters.bounds + slot * BOUND_FIELDS + BOUND) == ABOVE_ALL:
        window = room.windows + slot * WINDOW_FIELDS
        low, high = load_float(window + LOW), load_float(window + HIGH)
        middle = tl.load(window + MIDDLE)
        start, temperature, top, _, numerator = filtered_row(rows, filters.states, shape, WHOLE)
        # 1. which of these columns are in the window
        at = part * WINDOW_BLOCK + tl.arange(0, WINDOW_BLOCK)
        x = scaled(tl.load(start + at, mask=at < shape.width, other=-float("inf")), temperature)
        unit = unit_of(tl.load(filters.states + slot * LIST_FIELDS + SPREAD))
        position = position_of(x, top, unit)
        inside = (position >= low) & (position < high) & (at < shape.width)
        # 2. their sort keys, or their runs
        if middle < 0:
            row_list = room.lists + slot.to(tl.int64) * CAPACITY
            keys = sort_key(x, at)
            append_keys(keys, inside.to(tl.int32), window + COLLECTED, row_list, CAPACITY)
        else:
            parts = tl.num_programs(1)
            bucket = bucket_at(position)
            for run in tl.static_range(RUNS):
                of_run = inside & (((bucket > middle).to(tl.int32) - (bucket < middle)) == run - 1)
                ids = tl.sum(of_run.to(tl.int32), axis=0)
                tl.store(room.run_parts + (slot * RUNS + run) * parts + part, ids)
                if ids > 0:
                    least = tl.min(tl.where(of_run, x, float("inf")), axis=0)
                    most = tl.max(tl.where(of_run, x, -float("inf")), axis=0)
                    fields = window + FIRST_RUN + RUN_FIELDS * run
                    tl.atomic_add(fields + RUN_IDS, ids.to(tl.int64))
                    tl.atomic_min(fields + RUN_LEAST, value_key_of(least_key(least)))
                    tl.atomic_max(fields + RUN_MOST, value_key_of(least_key(most)))
        # 3. the mass above the window
        if (numerator < TOP_P_OFF) & (low > 0):
            mass = tl.sum(tl.where(position < low, fixed_point(x, top), 0), axis=0)
            if mass > 0:
                tl.atomic_add(window + MASS_ABOVE, mass)


@triton.jit
def enough_of_runs(runs, top, vocabulary, top_k, numerator, above, mass, total):
    """(run, how many of its lowest ids are kept, its value key); -1 ids where the window was wrong.

    Under top-k there is the middle run alone, and under top-k and top-p it begins at the top.
    above, mass: of the ids above the runs; total: the mass of the row.
    """
    kept = tl.full((), -1, tl.int64)
    kept_key = kept
    kept_run = tl.full((), 1, tl.int32)
    sought = (top_k < vocabulary) | (threshold_of(numerator, total) > mass)
    for run in tl.static_range(RUNS):
        # 1. the run: how many ids, of which value, and of which weight
        count = tl.load(runs + RUN_FIELDS * run + RUN_IDS)
        value_key = tl.load(runs + RUN_FIELDS * run + RUN_LEAST)
        single = value_key == tl.load(runs + RUN_FIELDS * run + RUN_MOST)
        weight = fixed_point(value_of(value_key * KEYS_PER_VALUE), top)
        # 2. how many of them the filters want
        wanted = count
        if top_k < vocabulary:
            wanted = top_k - above
            total = wanted * weight
        if numerator < TOP_P_OFF:
            missing = threshold_of(numerator, total) - mass
            needed = (missing + weight - 1) // tl.maximum(weight, 1)
            needed = tl.where((missing <= 0) | (weight <= 0), count + 1, needed)
            wanted = tl.where(top_k < vocabulary, tl.minimum(wanted, needed), needed)
        # 3. the first run that has as many
        sought &= (count == 0) | single
        here = sought & (count > 0) & (wanted > 0) & (wanted <= count)
        kept = tl.where(here, wanted, kept)
        kept_key = tl.where(here, value_key, kept_key)
        kept_run = tl.where(here, run, kept_run)
        sought &= here == 0
        mass += tl.where(count > 0, count * weight, 0)
    return kept_run, kept, kept_key


@triton.jit
def key_in_run(start, width, temperature, value_key, run_parts, parts, kept, PARTS: tl.constexpr):
    """The sort key of the kept-th lowest id whose scaled value has `value_key`."""
    # 1. the part of the row in which it stands, and which one of that part's ids it is
    at = tl.arange(0, PARTS)
    count = tl.load(run_parts + at, mask=at < parts, other=0).to(tl.int64)
    upto = tl.cumsum(count, axis=0)
    part = tl.sum(((upto < kept) & (at < parts)).to(tl.int32), axis=0)
    nth = kept - tl.sum(tl.where(at < part, count, 0), axis=0)
    # 2. the id
    ids = part * WINDOW_BLOCK + tl.arange(0, WINDOW_BLOCK)
    x = scaled(tl.load(start + ids, mask=ids < width, other=-float("inf")), temperature)
    key = sort_key(x, ids)
    equal = (value_key_of(key) == value_key) & (ids < width)
    last = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == nth)
    return tl.max(tl.where(last, key, KEEPS_ALL), axis=0)


@triton.jit
def bound_in_window(row, total, room, parts, width, ROW_PARTS: tl.constexpr):
    """The program's row's smallest kept sort key from its window; ABOVE_ALL where that was wrong.

    row: of `filtered_row`; total: its mass.
    """
    start, temperature, top, top_k, numerator = row
    slot = tl.program_id(0)
    window = room.windows + slot * WINDOW_FIELDS
    # 1. the window, as `collect_window` left it
    high = load_float(window + HIGH)
    above, count = tl.load(window + IDS_ABOVE), tl.load(window + COLLECTED)
    mass_above, middle = tl.load(window + MASS_ABOVE), tl.load(window + MIDDLE)
    bound = tl.full((), ABOVE_ALL, tl.int64)
    if high >= 0.0:
        # 2. a bound inside a run of ties
        if middle >= 0:
            run, kept, value_key = enough_of_runs(
                window + FIRST_RUN, top, width, top_k, numerator, above, mass_above, total
            )
            if kept > 0:
                run_parts = room.run_parts + slot * RUNS * parts + run * parts
                bound = key_in_run(
                    start, width, temperature, value_key, run_parts, parts, kept, ROW_PARTS
                )
        # 3. or among the listed sort keys
        elif count <= CAPACITY:
            at = tl.arange(0, CAPACITY)
            listed = at < count
            keys = tl.load(room.lists + slot.to(tl.int64) * CAPACITY + at, mask=listed, other=0)
            bound, _ = bound_of_list(
                keys, listed, top, width, top_k, numerator, above, mass_above, total
            )
    return bound
