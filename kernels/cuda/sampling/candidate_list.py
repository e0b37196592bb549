"""Top-k and top-p where few ids are kept: a floor, a short list of candidates above it, the sample.

    groups    the largest sort key of each run of ids, as the scan for the peaks saw them
    floor     a value that K groups or a few more reach: K ids at least do, so the top K do too
    list      the sort keys of all ids from the floor up, as a set, and the row's mass
    bound     the smallest kept sort key, exactly, from the list; the token, by exact scores

For top-k, K is k. For top-p alone it is a guess of how many ids are enough; the list's mass shows
whether they are. A row whose list is too long (ties) or too light falls through to `value_window`:
its bound is ABOVE_ALL. Scaling by the temperature keeps the order of values, but may make some
equal: the floor is a scaled value and takes all ids of it, so it cuts no ties.

    logits  fp32 [R, W], with WHOLE [F, V]     groups  int64 [R, used], with WHOLE [F, used]
    slots   int64 [F]                          lists   int64 [F, CAPACITY]
    states  int64 [F, LIST_FIELDS]             bounds  int64 [F, BOUND_FIELDS]
    counts  int32 [F, BUCKETS]                 of `value_window`, cleared here
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.gumbel_scores import exact_key, scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.row_peaks import largest_peak, sampled_row
from tpdet.kernels.cuda.sampling.row_table import (
    BOUND,
    BOUND_FIELDS,
    CHOICE,
    COPY,
    LOGITS_PEAK,
    MIN_P,
    POSITION,
    ROW_FIELDS,
    SAMPLE,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    float_bits,
    load_float,
)
from tpdet.kernels.cuda.sampling.sort_key_search import heaviest_bound, rough_floor
from tpdet.kernels.cuda.sampling.sort_keys import (
    ABOVE_ALL,
    BELOW_ALL,
    KEEPS_ALL,
    id_of,
    least_key,
    sort_key,
    value_of,
)
from tpdet.kernels.cuda.sampling.value_buckets import BUCKETS

CAPACITY = tl.constexpr(4096)
ENOUGH = tl.constexpr(1024)
"""Ids listed where top-p alone filters: more cost every row time, fewer let rows fall through."""

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


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def choose_floor(
    logits,
    copies,
    table,
    peaks,
    slots,
    groups,
    states,
    counts,
    bounds,
    used,
    rows,
    width,
    stride,
    peak_parts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The floor of each filtered row; clears what later kernels count; program (slot,)."""
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    # 1. the row's parameters and the largest of its groups
    peak = largest_peak(peaks + LOGITS_PEAK, tl.load(slots + slot), rows, peak_parts, PARTS)
    _, temperature, top, top_k, _ = row_of_slot(
        logits, copies, table, peaks, slots, rows, width, stride, peak_parts, PARTS, WHOLE
    )
    row = slot
    if not WHOLE:
        row = tl.load(slots + slot).to(tl.int32)
    at = tl.arange(0, GROUPS)
    group = tl.load(groups + row.to(tl.int64) * used + at, mask=at < used, other=BELOW_ALL)
    values = tl.where(group > BELOW_ALL, value_of(group), -float("inf"))
    reaching = tl.sum((values > -float("inf")).to(tl.int32), axis=0)
    wanted = tl.where(top_k < width, top_k, ENOUGH)
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
    state = states + slot * LIST_FIELDS
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
    tl.store(bounds + slot * BOUND_FIELDS + BOUND, tl.full((), ABOVE_ALL, tl.int64))
    tl.store(bounds + slot * BOUND_FIELDS + SAMPLE, tl.full((), ABOVE_ALL, tl.int64))
    at = tl.arange(0, BUCKETS)
    tl.store(counts + slot.to(tl.int64) * BUCKETS + at, tl.zeros((BUCKETS,), tl.int32))


@triton.jit
def list_candidates(
    logits,
    copies,
    table,
    slots,
    lists,
    states,
    width,
    stride,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Lists the sort keys from the floor up, adds the row's masses; program (slot, part).

    The atomics are integers, and the list is used as a set: how programs take turns is free.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields, state = table + row * ROW_FIELDS, states + slot * LIST_FIELDS
    start, copy = logits + slot.to(tl.int64) * stride, tl.load(fields + COPY)
    if not WHOLE:
        start = sampled_row(logits, copies, row, copy, stride, width)
    weighed = (tl.load(fields + TOP_P) < TOP_P_OFF) & (tl.load(fields + TOP_K) >= width)
    lowest = load_float(state + LOWEST_LOGIT)
    # 1. these columns, and the mass of the logits as they are
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(start + at, mask=at < width, other=-float("inf"))
    if not WHOLE:
        maximum = load_float(state + LOGITS_TOP)
        if copy < 0:
            tl.atomic_add(
                state + LOGITS_MASS, tl.sum(fixed_point(raw, maximum), axis=0), sem="relaxed"
            )
    near = tl.max((raw >= lowest).to(tl.int32), axis=0) > 0
    if weighed | near:
        x = scaled(raw, load_float(fields + TEMPERATURE))
        # 2. the mass of what is sampled from, for top-p alone
        if weighed:
            top = load_float(state + TOP_VALUE)
            tl.atomic_add(state + ROW_MASS, tl.sum(fixed_point(x, top), axis=0))
        # 3. the ids from the floor up
        floor = tl.load(state + FLOOR)
        every = floor == KEEPS_ALL
        inside = ((at < width) & (every | (x >= value_of(floor)))).to(tl.int32)
        count = tl.sum(inside, axis=0)
        if count > 0:
            before = tl.atomic_add(state + LISTED, count.to(tl.int64))
            if before < CAPACITY:
                place = before + tl.cumsum(inside, axis=0) - 1
                tl.store(
                    lists + slot.to(tl.int64) * CAPACITY + place,
                    sort_key(x, at),
                    mask=(inside > 0) & (place < CAPACITY),
                )


@triton.jit
def bound_by_list(keys, listed, top, vocabulary, top_k, numerator, total):
    """(smallest kept sort key of a list that begins at the top, its mass); ABOVE_ALL: too light."""
    bound = tl.full((), KEEPS_ALL, tl.int64)
    inside = tl.full((), -1, tl.int64)
    if top_k < vocabulary:
        bound = heaviest_bound(keys, listed.to(tl.int64), top_k)
    if numerator < TOP_P_OFF:
        weights = tl.where(listed & (keys >= bound), fixed_point(value_of(keys), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        threshold = threshold_of(numerator, total)
        if (threshold <= 0) | (inside < threshold):
            bound = tl.full((), ABOVE_ALL, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(keys, weights, threshold))
    return bound, inside


@triton.jit
def sample_of_list(keys, kept, fields):
    """The largest sort key of the exact scores of kept ids: a row's sample."""
    key0, key1 = tl.load(fields + SEED_LOW).to(tl.uint32), tl.load(fields + SEED_HIGH).to(tl.uint32)
    position, choice = (
        tl.load(fields + POSITION).to(tl.uint32),
        tl.load(fields + CHOICE).to(tl.uint32),
    )
    ids = id_of(keys)
    scores = exact_key(value_of(keys), ids, kept, position, choice, key0, key1)
    return tl.max(scores, axis=0)


@triton.jit
def bound_lanes(lists, count, fields, top, vocabulary, total, LANES: tl.constexpr):
    """Bound, sample and mass of a row whose list is no longer than LANES."""
    top_k, numerator = tl.load(fields + TOP_K), tl.load(fields + TOP_P)
    at = tl.arange(0, LANES)
    listed = at < count
    keys = tl.load(lists + at, mask=listed, other=BELOW_ALL)
    bound, inside = bound_by_list(keys, listed, top, vocabulary, top_k, numerator, total)
    least = top + load_float(fields + MIN_P)
    best = tl.full((), ABOVE_ALL, tl.int64)
    if bound < ABOVE_ALL:
        kept = listed & (keys >= bound) & (value_of(keys) >= least)
        best = sample_of_list(keys, kept, fields)
    return bound, best, inside


@triton.jit
def compare_lanes(lists, count, fields, top, vocabulary, total, LANES: tl.constexpr):
    """`bound_lanes` of a short list: each sort key is compared with all, without a search."""
    top_k, numerator = tl.load(fields + TOP_K), tl.load(fields + TOP_P)
    at = tl.arange(0, LANES)
    listed = at < count
    keys = tl.load(lists + at, mask=listed, other=BELOW_ALL)
    inside = tl.full((), -1, tl.int64)
    # 1. [what is at or above it, of]: sums over the first are a thread's own, the others are votes.
    upward = keys[:, None] >= keys[None, :]
    bound = tl.full((), KEEPS_ALL, tl.int64)
    # 2. top-k
    kept = listed
    if top_k < vocabulary:
        kept = listed & (tl.sum(upward.to(tl.int32), axis=0) <= top_k)
        bound = tl.min(tl.where(kept, keys, ABOVE_ALL), axis=0)
    # 3. top-p of what is kept
    if numerator < TOP_P_OFF:
        weights = tl.where(kept, fixed_point(value_of(keys), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        threshold = threshold_of(numerator, total)
        if (threshold <= 0) | (inside < threshold):
            bound = tl.full((), ABOVE_ALL, tl.int64)
        else:
            reached = tl.sum(tl.where(upward, weights[:, None], 0), axis=0) >= threshold
            heaviest = tl.where(kept & reached, keys, BELOW_ALL)
            bound = tl.maximum(bound, tl.max(heaviest, axis=0))
    # 4. min-p, and the sample
    least = top + load_float(fields + MIN_P)
    kept = listed & (keys >= bound) & (value_of(keys) >= least)
    return bound, sample_of_list(keys, kept, fields), inside


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
    table,
    slots,
    lists,
    groups,
    states,
    bounds,
    used,
    width,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """bounds[slot]: the bound and the best score's sort key, from the list; program (slot,).

    A row that falls through keeps ABOVE_ALL in both, and its state gets the spread.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields, state = table + row * ROW_FIELDS, states + slot * LIST_FIELDS
    count, total = tl.load(state + LISTED), tl.load(state + ROW_MASS)
    top = load_float(state + TOP_VALUE)
    top_k = tl.load(fields + TOP_K)
    mine = lists + slot.to(tl.int64) * CAPACITY
    bound = tl.full((), ABOVE_ALL, tl.int64)
    # 1. the bound by the cheapest search that the list's length allows
    enough = (top_k >= width) | (count >= top_k)
    if enough & (count <= CAPACITY):
        if count <= _COMPARED:
            bound, best, inside = compare_lanes(mine, count, fields, top, width, total, _COMPARED)
        elif count <= _FEW:
            bound, best, inside = bound_lanes(mine, count, fields, top, width, total, _FEW)
        else:
            bound, best, inside = bound_lanes(mine, count, fields, top, width, total, CAPACITY)
        if bound < ABOVE_ALL:
            tl.store(bounds + slot * BOUND_FIELDS + BOUND, bound)
            tl.store(bounds + slot * BOUND_FIELDS + SAMPLE, best)
        elif top_k >= width:
            tl.store(state + LIGHT_MASS, inside)
    # 2. the spread of a row that falls through
    if bound == ABOVE_ALL:
        place = slot.to(tl.int64)
        if not WHOLE:
            place = row
        temperature = load_float(fields + TEMPERATURE)
        tl.store(state + SPREAD, spread_of(groups + place * used, used, top, temperature, GROUPS))
