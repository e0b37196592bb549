"""Top-k and top-p where few ids are kept: a floor, a short list of candidates above it, the sample.

    groups    the largest sort key of each run of ids, as the scan for the row maximum saw them
    floor     a value that K groups or a few more reach: K ids at least do, so the top K do too
    list      the sort keys of all ids from the floor up, as a set, and the row's softmax sum
    bound     the smallest kept sort key, exactly, from the list; the token, by exact scores

For example k = 2, ids in groups of four:

    values   4 1 9 2 | 7 0 8 3 | 6 5 1 1      groups' largest 9, 8, 6
    floor    8 or less: two groups reach 8    list {9, 8}      bound: 8's key, the second largest

For top-k, K is k. For top-p alone it is a guess of how many ids are enough; the list's mass shows
whether they are. A row whose list is too long (ties) or too light falls through to `search.py`: its
bound is ABOVE_ALL. Scaling by the temperature keeps the order of values, but may make some equal:
the floor is a scaled value and takes all ids of it, so it cuts no ties.

A range of the listed sort keys is narrowed by three trial points at once, until one key is left
(`heaviest_bound`). One point halves the range of keys, so that the search ends within 54 rounds
whatever the values. The two others cut the range of values in three, which ends within a few rounds
where values spread evenly. Both ends then move onto keys that are there. Where one value is left,
its ids are cut in three. Sums are of integers: the points cannot be seen in the result.

    groups  int64 [R, used], of gathered rows [F, used]     lists   int64 [F, CAPACITY]
    states  int64 [F, LIST_FIELDS]                          bounds  int64 [F, BOUND_FIELDS]
    counts  int32 [F, BUCKETS]                              of `window.py`, cleared here
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.noise import counter_of, exact_key, fixed_point
from tpdet.kernels.cuda.sampling.peaks import largest_peak, sampled_row, scaled
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BELOW_ALL,
    BOUND,
    BOUND_FIELDS,
    COPY,
    FLOAT32_MOST,
    KEEPS_ALL,
    LOGITS_PEAK,
    MIN_P,
    ROW_FIELDS,
    SAMPLE,
    SAMPLED_PEAK,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_OFF,
    float_bits,
    id_of,
    least_key,
    load_float,
    sort_key,
    threshold_of,
    value_key_of,
    value_of,
)

CAPACITY = tl.constexpr(4096)
BLOCK = tl.constexpr(1024)
"""Columns of a row that a program lists."""
ENOUGH = tl.constexpr(1024)
"""Ids listed where top-p alone filters: more cost every row time, fewer let rows fall through."""
BUCKETS = tl.constexpr(256)
"""Few: without shared atomics a histogram's cost grows with them (Triton 3.6 counts by votes)."""

# Fields of a row's state, int64 [LIST_FIELDS]
FLOOR = tl.constexpr(0)  # the floor, as a sort key
LISTED = tl.constexpr(1)  # ids listed
ROW_MASS = tl.constexpr(2)  # of what is sampled from
SPREAD = tl.constexpr(3)  # fp32 bits, of a row that falls through: `spread_of`
LOWEST_LOGIT = tl.constexpr(4)  # fp32 bits of a logit below which none scales to the floor
TOP_VALUE = tl.constexpr(5)  # fp32 bits of the largest scaled value
LIGHT_MASS = tl.constexpr(6)  # of a whole list too light for top-p alone; -1: not known
ARRIVALS = tl.constexpr(7)  # programs that have counted the row
LOGITS_TOP = tl.constexpr(8)  # fp32 bits of the logits' largest, before bias and penalties
LOGITS_MASS = tl.constexpr(9)  # their mass, of a row without a copy, which is read here anyway
LIST_FIELDS = tl.constexpr(10)

_COMPARED = tl.constexpr(128)  # the longest list whose ids are compared pair by pair
_FEW = tl.constexpr(512)  # the longest list that is searched with as many lanes
_MARGIN = tl.constexpr(2.0**-20)  # of a value: more than division by the temperature rounds off
_SPREAD_STEPS = tl.constexpr(2.0**24)  # a distance of 1 as an integer
_MOST_DISTANCE = tl.constexpr(64.0)
_ONE_THIRD = tl.constexpr(0.33333334)
_TWO_THIRDS = tl.constexpr(0.6666667)
_COUNT_BITS = tl.constexpr(20)  # three counts below 2^20 stand in one int64
_COUNT_MASK = tl.constexpr((1 << 20) - 1)
_TRIALS = tl.constexpr(16)


class Bounds(NamedTuple):
    """What the filters say of F filtered rows."""

    bounds: torch.Tensor
    """int64 [F, BOUND_FIELDS]: the smallest kept sort key, and the best score's or ABOVE_ALL."""
    states: torch.Tensor
    """int64 [F, LIST_FIELDS]."""


@triton.jit
def trial_point(low, high, share, third):
    """A point in (low, high], low < high: by value where the ends' differ, by id where not."""
    bottom = tl.maximum(value_of(low), -FLOAT32_MOST)
    by_value = least_key(bottom * (1.0 - share) + value_of(high) * share)
    by_id = low + (high - low) // 3 * third
    point = tl.where(value_key_of(low) == value_key_of(high), by_id, by_value)
    return tl.minimum(tl.maximum(point, low + 1), high)


@triton.jit
def search_keys(keys, weights, threshold):
    """`heaviest_bound` by narrowing a range of sort keys."""
    none = tl.full(keys.shape, ABOVE_ALL, tl.int64)
    low = tl.min(tl.where(weights > 0, keys, none), axis=0)
    high = tl.max(tl.where(weights > 0, keys, -none), axis=0)
    while low < high:
        # 1. three points, in ascending order
        first = trial_point(low, high, _ONE_THIRD, 1)
        last = trial_point(low, high, _TWO_THIRDS, 2)
        middle = low + ((high - low + 1) >> 1)
        point1 = tl.minimum(middle, tl.minimum(first, last))
        point3 = tl.maximum(middle, tl.maximum(first, last))
        point2 = tl.maximum(tl.minimum(first, last), tl.minimum(middle, tl.maximum(first, last)))
        # 2. from which of them up the keys weigh enough
        reached1 = tl.sum(tl.where(keys >= point1, weights, 0), axis=0) >= threshold
        reached2 = tl.sum(tl.where(keys >= point2, weights, 0), axis=0) >= threshold
        reached3 = tl.sum(tl.where(keys >= point3, weights, 0), axis=0) >= threshold
        # 3. the range between the last point that reaches and the first that does not
        bottom = tl.where(reached1, point1, low)
        bottom = tl.where(reached2, point2, bottom)
        bottom = tl.where(reached3, point3, bottom)
        top = tl.where(reached3, high, point3 - 1)
        top = tl.where(reached2, top, point2 - 1)
        top = tl.where(reached1, top, point1 - 1)
        # 4. both ends onto keys that are there
        inside = (weights > 0) & (keys >= bottom) & (keys <= top)
        low = tl.min(tl.where(inside, keys, none), axis=0)
        high = tl.max(tl.where(inside, keys, -none), axis=0)
    return high


@triton.jit
def heaviest_bound(keys, upward, weights, threshold):
    """The largest of `keys` such that the keys from it up weigh `threshold`.

    keys: int64 [N]; weights: integers [N]. A key without weight is not there. All together weigh at
    least `threshold` > 0. Only sums, minima and maxima are taken: how the list is arranged is free.
    upward: of a short list bool [N, N], what is at or above each key.
    """
    if keys.shape[0] <= _COMPARED:
        reached = tl.sum(tl.where(upward, weights[:, None], 0), axis=0) >= threshold
        high = tl.max(tl.where((weights > 0) & reached, keys, BELOW_ALL), axis=0)
    else:
        high = search_keys(keys, weights, threshold)
    return high


@triton.jit
def reaching_three(values, point1, point2, point3):
    """How many of fp32 [N] reach each of three points, by one sum; N < 2^20."""
    both = (values >= point1).to(tl.int64) + ((values >= point2).to(tl.int64) << _COUNT_BITS)
    counts = tl.sum(both + ((values >= point3).to(tl.int64) << (2 * _COUNT_BITS)), axis=0)
    return counts & _COUNT_MASK, (counts >> _COUNT_BITS) & _COUNT_MASK, counts >> (2 * _COUNT_BITS)


@triton.jit
def rough_floor(values, wanted, finite):
    """A value that at least `wanted` of `values` reach, and as few more as 16 rounds allow.

    values: fp32 [N], N < 2^20; what is not there is -inf. `finite` of them are finite, at least
    `wanted`.
    """
    low = tl.min(tl.where(values > -float("inf"), values, float("inf")), axis=0)
    high = tl.max(values, axis=0)
    count = finite.to(tl.int64)
    enough = wanted + wanted // 4 + 8
    trials = 0
    while (trials < _TRIALS) & (count > enough):
        point1 = low * 0.75 + high * 0.25
        point2 = low * 0.5 + high * 0.5
        point3 = low * 0.25 + high * 0.75
        count1, count2, count3 = reaching_three(values, point1, point2, point3)
        # The highest point that enough values reach; the one above it is the new end.
        high = tl.where(count3 >= wanted, high, point3)
        high = tl.where(count2 >= wanted, high, point2)
        high = tl.where(count1 >= wanted, high, point1)
        low = tl.where(count1 >= wanted, point1, low)
        low = tl.where(count2 >= wanted, point2, low)
        low = tl.where(count3 >= wanted, point3, low)
        count = tl.where(count1 >= wanted, count1, count)
        count = tl.where(count2 >= wanted, count2, count)
        count = tl.where(count3 >= wanted, count3, count)
        trials += 1
    return low


@triton.jit
def filtered_row(rows, states, shape, WHOLE: tl.constexpr):
    """What filters read of the program's row: start, temperature, largest scaled value, k and P.

    WHOLE: the logits are the filtered rows alone. states: as `choose_floor` left them.
    """
    slot = tl.program_id(0)
    row = tl.load(rows.slots + slot)
    fields = rows.table + row * ROW_FIELDS
    start = rows.logits + slot.to(tl.int64) * shape.stride
    if not WHOLE:
        start = sampled_row(rows, shape, row, tl.load(fields + COPY))
    temperature = load_float(fields + TEMPERATURE)
    top = load_float(states + slot * LIST_FIELDS + TOP_VALUE)
    return start, temperature, top, tl.load(fields + TOP_K), tl.load(fields + TOP_P)


@triton.jit(do_not_specialize=["height", "peak_parts"])
def choose_floor(
    rows,
    filters,
    shape,
    height,
    peak_parts,
    counts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The floor of each filtered row; clears what later kernels count; program (slot,)."""
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    # 1. the row's parameters and the largest of its groups
    row = tl.load(rows.slots + slot)
    fields = rows.table + row * ROW_FIELDS
    temperature, top_k = load_float(fields + TEMPERATURE), tl.load(fields + TOP_K)
    count = height, peak_parts
    peak = largest_peak(rows.peaks + LOGITS_PEAK, row, count, PARTS)
    sampled_peak = largest_peak(rows.peaks + SAMPLED_PEAK, row, count, PARTS)
    top = scaled(value_of(sampled_peak), temperature)
    if WHOLE:
        row = slot.to(tl.int64)
    at = tl.arange(0, GROUPS)
    group = tl.load(rows.groups + row * shape.groups + at, mask=at < shape.groups, other=BELOW_ALL)
    values = tl.where(group > BELOW_ALL, value_of(group), -float("inf"))
    reaching = tl.sum((values > -float("inf")).to(tl.int32), axis=0)
    wanted = tl.where(top_k < shape.width, top_k, ENOUGH)
    # 2. a floor that as many groups reach as ids are wanted
    floor = tl.full((), KEEPS_ALL, tl.int64)
    lowest = tl.full((), -float("inf"), tl.float32)
    if wanted <= tl.minimum(reaching, CAPACITY):
        least = rough_floor(values, wanted, reaching)
        floor = least_key(scaled(least, temperature))
        below = least - tl.abs(least) * _MARGIN
        # Scaling is monotone: if this one falls below the floor, so do all that are less.
        lowest = tl.where(scaled(below, temperature) < scaled(least, temperature), below, lowest)
    # 3. the row's state, in the order of its fields
    state = filters.states + slot * LIST_FIELDS
    tl.store(state + FLOOR, floor)
    tl.store(state + LISTED, tl.zeros((), tl.int64))
    tl.store(state + ROW_MASS, tl.zeros((), tl.int64))
    tl.store(state + SPREAD, tl.zeros((), tl.int64))
    tl.store(state + LOWEST_LOGIT, float_bits(lowest))
    tl.store(state + TOP_VALUE, float_bits(top))
    tl.store(state + LIGHT_MASS, tl.full((), -1, tl.int64))
    tl.store(state + ARRIVALS, tl.zeros((), tl.int64))
    tl.store(state + LOGITS_TOP, float_bits(value_of(peak)))
    tl.store(state + LOGITS_MASS, tl.zeros((), tl.int64))
    # 4. no bound, no sample, nothing counted
    bound = filters.bounds + slot * BOUND_FIELDS
    tl.store(bound + BOUND, tl.full((), ABOVE_ALL, tl.int64))
    tl.store(bound + SAMPLE, tl.full((), ABOVE_ALL, tl.int64))
    bucket = tl.arange(0, BUCKETS)
    tl.store(counts + slot.to(tl.int64) * BUCKETS + bucket, tl.zeros((BUCKETS,), tl.int32))


@triton.jit
def append_keys(keys, inside, listed, row_list, CAPACITY: tl.constexpr):
    """Appends the sort keys that are `inside` (int32 0 or 1) to a list, as far as it has room.

    listed: where its length is counted, beyond CAPACITY too. The atomics are integers, and the list
    is used as a set: how programs take turns is free.
    """
    count = tl.sum(inside, axis=0)
    if count > 0:
        before = tl.atomic_add(listed, count.to(tl.int64))
        if before < CAPACITY:
            at = before + tl.cumsum(inside, axis=0) - 1
            tl.store(row_list + at, keys, mask=(inside > 0) & (at < CAPACITY))


@triton.jit
def list_candidates(rows, filters, shape, lists, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Lists the sort keys from the floor up, adds the row's masses; program (slot, part)."""
    await_earlier(DEPENDENT)
    slot, width = tl.program_id(0), shape.width
    row = tl.load(rows.slots + slot)
    fields, state = rows.table + row * ROW_FIELDS, filters.states + slot * LIST_FIELDS
    start, copy = rows.logits + slot.to(tl.int64) * shape.stride, tl.load(fields + COPY)
    if not WHOLE:
        start = sampled_row(rows, shape, row, copy)
    weighed = (tl.load(fields + TOP_P) < TOP_P_OFF) & (tl.load(fields + TOP_K) >= width)
    lowest = load_float(state + LOWEST_LOGIT)
    # 1. these columns, and the mass of the logits as they are
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(start + at, mask=at < width, other=-float("inf"))
    if not WHOLE:
        maximum = load_float(state + LOGITS_TOP)
        if copy < 0:
            mass = tl.sum(fixed_point(raw, maximum), axis=0)
            tl.atomic_add(state + LOGITS_MASS, mass, sem="relaxed")
    near = tl.max((raw >= lowest).to(tl.int32), axis=0) > 0
    if weighed | near:
        x = scaled(raw, load_float(fields + TEMPERATURE))
        # 2. the mass of what is sampled from, for top-p alone
        if weighed:
            top = load_float(state + TOP_VALUE)
            tl.atomic_add(state + ROW_MASS, tl.sum(fixed_point(x, top), axis=0))
        # 3. the ids from the floor up
        floor = tl.load(state + FLOOR)
        inside = ((at < width) & ((floor == KEEPS_ALL) | (x >= value_of(floor)))).to(tl.int32)
        row_list = lists + slot.to(tl.int64) * CAPACITY
        append_keys(sort_key(x, at), inside, state + LISTED, row_list, CAPACITY)


@triton.jit
def bound_of_list(keys, listed, top, vocabulary, top_k, numerator, above, mass_above, total):
    """(smallest kept sort key of a list, its mass under top-p, else -1); ABOVE_ALL: too light.

    above, mass_above: how many ids and what mass stand above the list; total: of the row.
    """
    bound = tl.full((), KEEPS_ALL, tl.int64)
    inside = tl.full((), -1, tl.int64)
    upward = keys
    if keys.shape[0] <= _COMPARED:
        # [what is at or above it, of]: sums over the first are a thread's own, the others votes.
        upward = keys[:, None] >= keys[None, :]
    if top_k < vocabulary:
        ones = listed.to(tl.int32 if keys.shape[0] <= _COMPARED else tl.int64)
        bound = heaviest_bound(keys, upward, ones, top_k - above)
    if numerator < TOP_P_OFF:
        weights = tl.where(listed & (keys >= bound), fixed_point(value_of(keys), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        missing = threshold_of(numerator, total) - mass_above
        if (missing <= 0) | (inside < missing):
            bound = tl.full((), ABOVE_ALL, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(keys, upward, weights, missing))
    return bound, inside


@triton.jit
def sample_of_list(keys, kept, fields):
    """The largest sort key of the exact scores of kept ids: a row's sample."""
    return tl.max(exact_key(value_of(keys), id_of(keys), kept, counter_of(fields)), axis=0)


@triton.jit
def bound_lanes(row_list, count, fields, top, vocabulary, total, LANES: tl.constexpr):
    """Bound, sample and mass of a row whose list is no longer than LANES."""
    top_k, numerator = tl.load(fields + TOP_K), tl.load(fields + TOP_P)
    at = tl.arange(0, LANES)
    listed = at < count
    keys = tl.load(row_list + at, mask=listed, other=BELOW_ALL)
    bound, inside = bound_of_list(keys, listed, top, vocabulary, top_k, numerator, 0, 0, total)
    least = top + load_float(fields + MIN_P)
    best = tl.full((), ABOVE_ALL, tl.int64)
    if bound < ABOVE_ALL:
        kept = listed & (keys >= bound) & (value_of(keys) >= least)
        best = sample_of_list(keys, kept, fields)
    return bound, best, inside


@triton.jit
def spread_of(groups, used, top, temperature, GROUPS: tl.constexpr):
    """How far a row's largest scaled value lies from its groups' largest, on the average: bits.

    Each distance is held at 64.
    """
    at = tl.arange(0, GROUPS)
    group = tl.load(groups + at, mask=at < used, other=BELOW_ALL)
    there = group > BELOW_ALL
    below = tl.minimum(tl.maximum(top - scaled(value_of(group), temperature), 0.0), _MOST_DISTANCE)
    total = tl.sum(tl.where(there, (below * _SPREAD_STEPS).to(tl.int64), 0), axis=0)
    spread = total // tl.maximum(tl.sum(there.to(tl.int64), axis=0), 1)
    return float_bits(spread.to(tl.float32) * (1.0 / _SPREAD_STEPS))


@triton.jit
def bound_candidates(
    rows, filters, shape, lists, WHOLE: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """bounds[slot]: the bound and the best score's sort key, from the list; program (slot,).

    A row that falls through keeps ABOVE_ALL in both, and its state gets the spread.
    """
    await_earlier(DEPENDENT)
    slot, width = tl.program_id(0), shape.width
    row = tl.load(rows.slots + slot)
    fields, state = rows.table + row * ROW_FIELDS, filters.states + slot * LIST_FIELDS
    count, total = tl.load(state + LISTED), tl.load(state + ROW_MASS)
    top = load_float(state + TOP_VALUE)
    top_k = tl.load(fields + TOP_K)
    row_list = lists + slot.to(tl.int64) * CAPACITY
    bound = tl.full((), ABOVE_ALL, tl.int64)
    # 1. the bound by the cheapest search that the list's length allows
    enough = (top_k >= width) | (count >= top_k)
    if enough & (count <= CAPACITY):
        if count <= _COMPARED:
            bound, best, inside = bound_lanes(row_list, count, fields, top, width, total, _COMPARED)
        elif count <= _FEW:
            bound, best, inside = bound_lanes(row_list, count, fields, top, width, total, _FEW)
        else:
            bound, best, inside = bound_lanes(row_list, count, fields, top, width, total, CAPACITY)
        if bound < ABOVE_ALL:
            tl.store(filters.bounds + slot * BOUND_FIELDS + BOUND, bound)
            tl.store(filters.bounds + slot * BOUND_FIELDS + SAMPLE, best)
        elif top_k >= width:
            tl.store(state + LIGHT_MASS, inside)
    # 2. the spread of a row that falls through
    if bound == ABOVE_ALL:
        group_row = slot.to(tl.int64)
        if not WHOLE:
            group_row = row
        groups = rows.groups + group_row * shape.groups
        temperature = load_float(fields + TEMPERATURE)
        tl.store(state + SPREAD, spread_of(groups, shape.groups, top, temperature, GROUPS))
