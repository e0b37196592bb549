"""Top-k and top-p where the kept ids are few: a floor, a short list above it, and the sample.

    groups    the largest order of each run of ids, as the scan for the peaks saw them
    floor     a value that K groups or a few more reach: K ids at least do, so the top K do too
    list      the orders of all ids from the floor up, in any order, and the row's mass
    bound     the smallest kept order, exactly, from the list; the token, by exact scores

For top-k, K is k. For top-p alone it is a guess of how many ids are enough; the list's mass shows
whether they are. A row whose list is too long (ties) or too light falls through (a bound of 2^62)
to `filter_window`. Scaling by the temperature keeps the order of values, but may make some equal:
the floor is a scaled value and takes all ids of it, so it cuts no ties.

Fields of a state int64 [F, 10]:
    0  floor
    1  ids listed
    2  mass of the row
    3  bits of the spread of a row that falls through: the distance of the largest scaled value from
       the groups' largest, on the average; each held at 64
    4  bits of a logit below which none scales to the floor
    5  bits of the largest scaled value
    6  mass of the list where it is whole and too light for top-p alone; -1: not known
    7  programs that have counted the row
    8  bits of the logits' own largest
    9  their mass, of a row without a copy, which is read here anyway
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.filter_row import row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.gumbel_scores import exact_order, scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import id_of_order, largest, source, value_of
from tpdet.kernels.cuda.sampling.sort_key_search import heaviest_bound, least_order, rough_floor
from tpdet.kernels.cuda.sampling.sort_keys import order_of

CAPACITY = 4096
ENOUGH = 1024
"""Ids listed where top-p alone filters: more cost every row time, fewer let rows fall through."""
STATE = 10


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def choose_floor(
    logits,
    copies,
    table,
    peaks,
    slots,
    groups,
    state,
    counts,
    bounds,
    used,
    rows,
    width,
    stride,
    peak_parts,
    FIELDS: tl.constexpr,
    STATE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    ENOUGH: tl.constexpr,
    CAPACITY: tl.constexpr,
    COUNTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The floor of each filtered row; clears what is counted later; (slot,).

    groups: int64 [R, used] of all rows, or with WHOLE of the filtered ones [F, used].
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    peak = largest(peaks, tl.load(slots + slot), rows, peak_parts, 2, PARTS)
    _, temperature, top, top_k, _ = row_of_slot(
        logits, copies, table, peaks, slots, rows, width, stride, peak_parts, FIELDS, PARTS, WHOLE
    )
    place = slot
    if not WHOLE:
        place = tl.load(slots + slot).to(tl.int32)
    at = tl.arange(0, GROUPS)
    group = tl.load(
        groups + place.to(tl.int64) * used + at, mask=at < used, other=-4611686018427387904
    )
    values = tl.where(group > -4611686018427387904, value_of(group), -float("inf"))
    reaching = tl.sum((values > -float("inf")).to(tl.int32), axis=0)
    wanted = tl.where(top_k < width, top_k, ENOUGH)
    floor = tl.full((), -9007199254740992, tl.int64)
    lowest = tl.full((), -float("inf"), tl.float32)
    if wanted <= tl.minimum(reaching, CAPACITY):
        least = rough_floor(values, wanted, reaching)
        floor = least_order(scaled(least, temperature))
        below = least - tl.abs(least) * 9.5367431640625e-07
        # Scaling is monotone: if this one falls below the floor, so do all that are less.
        lowest = tl.where(scaled(below, temperature) < scaled(least, temperature), below, lowest)
    out = state + slot * STATE
    tl.store(out, floor)
    tl.store(out + 1, tl.zeros((), tl.int64))
    tl.store(out + 2, tl.zeros((), tl.int64))
    tl.store(out + 3, tl.zeros((), tl.int64))
    tl.store(out + 4, lowest.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(out + 5, top.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(out + 6, tl.full((), -1, tl.int64))
    tl.store(out + 7, tl.zeros((), tl.int64))
    tl.store(out + 8, value_of(peak).to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(out + 9, tl.zeros((), tl.int64))
    tl.store(bounds + slot * 2, tl.full((), 4611686018427387904, tl.int64))
    tl.store(bounds + slot * 2 + 1, tl.full((), 4611686018427387904, tl.int64))
    at = tl.arange(0, COUNTS)
    tl.store(counts + slot.to(tl.int64) * COUNTS + at, tl.zeros((COUNTS,), tl.int32))


@triton.jit
def list_top(
    logits,
    copies,
    table,
    slots,
    lists,
    state,
    width,
    stride,
    FIELDS: tl.constexpr,
    STATE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Lists the orders from the floor up, adds the row's masses; program (slot, part).

    The atomics are integers: the list is used as a set.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields, out = table + row * FIELDS, state + slot * STATE
    start, copy = logits + slot.to(tl.int64) * stride, tl.load(fields + 9)
    if not WHOLE:
        start = source(logits, copies, row, copy, stride, width)
    weighed = (tl.load(fields + 7) < 1073741824) & (tl.load(fields + 6) >= width)
    lowest = tl.load(out + 4).to(tl.int32).to(tl.float32, bitcast=True)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(start + at, mask=at < width, other=-float("inf"))
    if not WHOLE:
        maximum = tl.load(out + 8).to(tl.int32).to(tl.float32, bitcast=True)
        if copy < 0:
            tl.atomic_add(out + 9, tl.sum(fixed_point(raw, maximum), axis=0), sem="relaxed")
    near = tl.max((raw >= lowest).to(tl.int32), axis=0) > 0
    if weighed | near:
        x = scaled(raw, tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True))
        if weighed:
            top = tl.load(out + 5).to(tl.int32).to(tl.float32, bitcast=True)
            tl.atomic_add(out + 2, tl.sum(fixed_point(x, top), axis=0))
        floor = tl.load(out)
        every = floor == -9007199254740992
        inside = ((at < width) & (every | (x >= value_of(floor)))).to(tl.int32)
        count = tl.sum(inside, axis=0)
        if count > 0:
            before = tl.atomic_add(out + 1, count.to(tl.int64))
            if before < CAPACITY:
                place = before + tl.cumsum(inside, axis=0) - 1
                tl.store(
                    lists + slot.to(tl.int64) * CAPACITY + place,
                    order_of(x, at),
                    mask=(inside > 0) & (place < CAPACITY),
                )


@triton.jit
def bound_by_list(orders, listed, top, vocabulary, top_k, numerator, total):
    """(smallest kept order of a list that begins at the top; 2^62 where it is too light, mass)."""
    bound = tl.full((), -9007199254740992, tl.int64)
    inside = tl.full((), -1, tl.int64)
    if top_k < vocabulary:
        bound = heaviest_bound(orders, listed.to(tl.int64), top_k)
    if numerator < 1073741824:
        weights = tl.where(listed & (orders >= bound), fixed_point(value_of(orders), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        threshold = threshold_of(numerator, total)
        if (threshold <= 0) | (inside < threshold):
            bound = tl.full((), 4611686018427387904, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(orders, weights, threshold))
    return bound, inside


@triton.jit
def sample_of_list(orders, kept, fields):
    """The largest order of the exact scores of kept orders: a row's sample."""
    key0, key1 = tl.load(fields).to(tl.uint32), tl.load(fields + 1).to(tl.uint32)
    position, choice = tl.load(fields + 2).to(tl.uint32), tl.load(fields + 3).to(tl.uint32)
    ids = id_of_order(orders)
    scores = exact_order(value_of(orders), ids, kept, position, choice, key0, key1)
    return tl.max(scores, axis=0)


@triton.jit
def bound_lanes(lists, count, fields, top, vocabulary, total, LANES: tl.constexpr):
    """Bound, sample and mass of a row whose list is no longer than LANES."""
    top_k, numerator = tl.load(fields + 6), tl.load(fields + 7)
    at = tl.arange(0, LANES)
    listed = at < count
    orders = tl.load(lists + at, mask=listed, other=-4611686018427387904)
    bound, inside = bound_by_list(orders, listed, top, vocabulary, top_k, numerator, total)
    least = top + tl.load(fields + 8).to(tl.int32).to(tl.float32, bitcast=True)
    best = tl.full((), 4611686018427387904, tl.int64)
    if bound < 4611686018427387904:
        kept = listed & (orders >= bound) & (value_of(orders) >= least)
        best = sample_of_list(orders, kept, fields)
    return bound, best, inside


@triton.jit
def compare_lanes(lists, count, fields, top, vocabulary, total, LANES: tl.constexpr):
    """`bound_lanes` of a short list: each order is compared with all, without a search."""
    top_k, numerator = tl.load(fields + 6), tl.load(fields + 7)
    at = tl.arange(0, LANES)
    listed = at < count
    orders = tl.load(lists + at, mask=listed, other=-4611686018427387904)
    inside = tl.full((), -1, tl.int64)
    # [what is at or above it, of]: sums over the first are a thread's own, the others are votes.
    upward = orders[:, None] >= orders[None, :]
    bound = tl.full((), -9007199254740992, tl.int64)
    kept = listed
    if top_k < vocabulary:
        kept = listed & (tl.sum(upward.to(tl.int32), axis=0) <= top_k)
        bound = tl.min(tl.where(kept, orders, 4611686018427387904), axis=0)
    if numerator < 1073741824:
        weights = tl.where(kept, fixed_point(value_of(orders), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        threshold = threshold_of(numerator, total)
        if (threshold <= 0) | (inside < threshold):
            bound = tl.full((), 4611686018427387904, tl.int64)
        else:
            reached = tl.sum(tl.where(upward, weights[:, None], 0), axis=0) >= threshold
            heaviest = tl.where(kept & reached, orders, -4611686018427387904)
            bound = tl.maximum(bound, tl.max(heaviest, axis=0))
    least = top + tl.load(fields + 8).to(tl.int32).to(tl.float32, bitcast=True)
    kept = listed & (orders >= bound) & (value_of(orders) >= least)
    return bound, sample_of_list(orders, kept, fields), inside


@triton.jit
def spread_of(groups, used, top, temperature, GROUPS: tl.constexpr):
    """How far a row's largest scaled value lies from its groups' largest, on the average: bits."""
    at = tl.arange(0, GROUPS)
    group = tl.load(groups + at, mask=at < used, other=-4611686018427387904)
    there = group > -4611686018427387904
    below = tl.minimum(tl.maximum(top - scaled(value_of(group), temperature), 0.0), 64.0)
    total = tl.sum(tl.where(there, (below * 16777216.0).to(tl.int64), 0), axis=0)
    spread = total // tl.maximum(tl.sum(there.to(tl.int64), axis=0), 1)
    return (spread.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def bound_top(
    table,
    slots,
    lists,
    groups,
    state,
    bounds,
    used,
    width,
    FIELDS: tl.constexpr,
    STATE: tl.constexpr,
    WHOLE: tl.constexpr,
    COMPARED: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """bounds[slot]: the bound, and the best score's order, from the list; program (slot,).

    A row that falls through keeps its 2^62 in both, and gets its spread. groups: of
    `choose_floor`.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields, held = table + row * FIELDS, state + slot * STATE
    count, total = tl.load(held + 1), tl.load(held + 2)
    top = tl.load(held + 5).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.load(fields + 6)
    mine = lists + slot.to(tl.int64) * CAPACITY
    bound = tl.full((), 4611686018427387904, tl.int64)
    enough = (top_k >= width) | (count >= top_k)
    if enough & (count <= CAPACITY):
        if count <= COMPARED:
            bound, best, inside = compare_lanes(mine, count, fields, top, width, total, COMPARED)
        elif count <= FEW:
            bound, best, inside = bound_lanes(mine, count, fields, top, width, total, FEW)
        else:
            bound, best, inside = bound_lanes(mine, count, fields, top, width, total, CAPACITY)
        if bound < 4611686018427387904:
            tl.store(bounds + slot * 2, bound)
            tl.store(bounds + slot * 2 + 1, best)
        elif top_k >= width:
            tl.store(held + 6, inside)
    if bound == 4611686018427387904:
        place = slot.to(tl.int64)
        if not WHOLE:
            place = row
        temperature = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(held + 3, spread_of(groups + place * used, used, top, temperature, GROUPS))
