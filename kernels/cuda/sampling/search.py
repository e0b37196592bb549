"""Bounds of top-k and top-p for all filtered rows of a step, and samples where few ids are kept.

    choose_floor, list_candidates, bound_candidates  most rows' bound and sample (`candidates.py`)
    count_buckets, collect_window                    windows of rows that fall through (`window.py`)
    bound_fallbacks                                  their bounds: from the window or, after a
                                                     wrong guess, digit by digit, as follows

Where no row falls through, which is usual, the last three end at once.

The rank of a value among all there are, from the largest on, is a number of 33 bits: three digits
of 11. A pass over the row adds what each digit's ids weigh, for ids that have the digits found so
far; the digit at which the threshold is reached is the next. Three passes find the value, whatever
the values are. One more pass finds the last kept id of those that have it, which weigh alike. For
example with two decimal digits, top-k of 3 of ids of ranks 12, 17, 17, 31: digit 1 holds three ids,
enough; of those digit 2 holds one and digit 7 two, so rank 17 is reached with two ids missing, and
the second of the ids that have it is the last. Under top-k and top-p the ids from top-k's bound up
are searched again. Sums are of integers, added by atomics: any order gives the same.

    row     of `filtered_row`     digits  int64 [DIGITS], sums by digit
"""

from functools import partial

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.sampling import candidates, window
from tpdet.kernels.cuda.sampling.candidates import LIST_FIELDS, ROW_MASS, Bounds, filtered_row
from tpdet.kernels.cuda.sampling.noise import fixed_point
from tpdet.kernels.cuda.sampling.peaks import LogitRows, RowShape, numbers_beside, options, scaled
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BOUND,
    BOUND_FIELDS,
    KEEPS_ALL,
    KEYS_PER_VALUE,
    MOST_VALUE_KEY,
    TOP_P_OFF,
    sort_key,
    threshold_of,
    value_key_of,
    value_of,
)
from tpdet.kernels.cuda.sampling.window import WindowRoom, bound_in_window

METHODS = ("list", "window", "digits")
"""How a bound is found: each method answers for rows that fall through those before it."""

DIGITS = tl.constexpr(2048)
_DIGIT_BITS = tl.constexpr(11)
_FIRST_SHIFT = tl.constexpr(22)  # of the highest of three digits
# Columns read at a time: with twice as many `bound_fallbacks` would spill registers.
SEARCH_BLOCK = tl.constexpr(2048)


@triton.jit
def rank_of_value(value_key):
    """The rank of a value among all there are, 0 for the largest; and back."""
    return tl.full((), MOST_VALUE_KEY, tl.int64) - value_key


@triton.jit
def keys_at(start, first, width, temperature):
    """Scaled values of SEARCH_BLOCK columns from `first`, their sort keys, which are in the row."""
    at = first + tl.arange(0, SEARCH_BLOCK)
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    return x, sort_key(x, at), at < width


@triton.jit
def sum_digits(row, floor, width, digits, before, shift, BY_MASS: tl.constexpr):
    """int64 [DIGITS]: what ids from the sort key `floor` up weigh (1, or their mass) by a digit.

    before: the digits above it, as one number; shift: bits below it. digits: room for the sums.
    """
    start, temperature, top, _, _ = row
    digit = tl.arange(0, DIGITS)
    tl.debug_barrier()  # what stood there has been read
    tl.store(digits + digit, tl.zeros((DIGITS,), tl.int64))
    tl.debug_barrier()
    for first in range(0, width, SEARCH_BLOCK):
        x, key, there = keys_at(start, first, width, temperature)
        weight = tl.full((SEARCH_BLOCK,), 1, tl.int64)
        if BY_MASS:
            weight = fixed_point(x, top)
        rank = rank_of_value(value_key_of(key))
        counts = there & (key >= floor) & ((rank >> (shift + _DIGIT_BITS)) == before)
        counts &= weight != 0
        tl.atomic_add(digits + ((rank >> shift) & (DIGITS - 1)), weight, mask=counts, sem="relaxed")
    tl.debug_barrier()
    return tl.load(digits + digit, cache_modifier=".cg")  # atomics pass by the L1 cache


@triton.jit
def last_of_value(start, width, temperature, floor, value_key, kept):
    """The sort key of the kept-th lowest id of a value, of the sort keys from `floor` up."""
    bound = tl.full((), KEEPS_ALL, tl.int64)
    seen = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int32)
    while (first < width) & (seen < kept):
        _, key, there = keys_at(start, first, width, temperature)
        equal = there & (key >= floor) & (value_key_of(key) == value_key)
        count = tl.sum(equal.to(tl.int32), axis=0).to(tl.int64)
        if seen + count >= kept:
            last = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == kept - seen)
            bound = tl.max(tl.where(last, key, KEEPS_ALL), axis=0)
        seen += count
        first += SEARCH_BLOCK
    return bound


@triton.jit
def search_row(row, floor, width, wanted, digits, BY_MASS: tl.constexpr):
    """The largest sort key from which the ids, of those from `floor` up, weigh enough.

    wanted: how many ids, or with BY_MASS the numerator P of their mass.
    """
    start, temperature, top, _, _ = row
    before = tl.zeros((), tl.int64)
    missing = wanted.to(tl.int64)
    digit = tl.arange(0, DIGITS)
    # 1. the digits of the value, the highest first
    shift = tl.full((), _FIRST_SHIFT, tl.int64)
    while shift >= 0:
        weights = sum_digits(row, floor, width, digits, before, shift, BY_MASS)
        if BY_MASS & (shift == _FIRST_SHIFT):
            missing = threshold_of(wanted, tl.sum(weights, axis=0))
        next_digit = tl.sum((tl.cumsum(weights, axis=0) < missing).to(tl.int32), axis=0)
        missing -= tl.sum(tl.where(digit < next_digit, weights, 0), axis=0)
        before = before * DIGITS + next_digit
        shift -= _DIGIT_BITS
    # 2. how many ids of the value are kept, and the last of them
    value_key = rank_of_value(before)
    if BY_MASS:
        weight = tl.maximum(fixed_point(value_of(value_key * KEYS_PER_VALUE), top), 1)
        missing = (missing + weight - 1) // weight
    return last_of_value(start, width, temperature, floor, value_key, missing)


@triton.jit
def bound_by_digits(row, width, digits):
    """A row's smallest kept sort key, over all its ids; digits: int64 [DIGITS], room for sums."""
    _, _, _, top_k, numerator = row
    bound = tl.full((), KEEPS_ALL, tl.int64)
    if top_k < width:
        bound = search_row(row, bound, width, top_k, digits, False)
    if numerator < TOP_P_OFF:
        bound = tl.maximum(bound, search_row(row, bound, width, numerator, digits, True))
    return bound


@triton.jit
def bound_fallbacks(
    rows,
    filters,
    shape,
    room,
    digits,
    parts,
    WHOLE: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    BY_WINDOW: tl.constexpr,
    BY_DIGITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """bounds[slot] of rows that fall through (ABOVE_ALL); program (slot,).

    parts: of `collect_window`. BY_WINDOW and BY_DIGITS: whether the window, and the search
    by digits where it was wrong, may answer.
    """
    await_earlier(DEPENDENT)
    slot, width = tl.program_id(0), shape.width
    bound_field = filters.bounds + slot * BOUND_FIELDS + BOUND
    # 1. from the window
    if BY_WINDOW:
        if tl.load(bound_field) == ABOVE_ALL:
            row = filtered_row(rows, filters.states, shape, WHOLE)
            total = tl.load(filters.states + slot * LIST_FIELDS + ROW_MASS)
            bound = bound_in_window(row, total, room, parts, width, ROW_PARTS)
            tl.store(bound_field, bound)
        # The bound is read again, as the row is: no register holds them meanwhile.
        tl.debug_barrier()
    # 2. digit by digit, where the window was wrong
    if BY_DIGITS:  # noqa: SIM102 (a compile-time condition)
        if tl.load(bound_field) == ABOVE_ALL:
            row = filtered_row(rows, filters.states, shape, WHOLE)
            row_digits = digits + slot.to(tl.int64) * DIGITS
            tl.store(bound_field, bound_by_digits(row, width, row_digits))


def find_bounds(
    rows: LogitRows, vocabulary: int, whole: bool, methods: tuple[str, ...] = METHODS
) -> Bounds:
    """Smallest kept sort keys and samples of the table's rows `slots`; kernels only.

    A sample is the sort key of the best score, or ABOVE_ALL if `sum_rows` has to find it.
    `whole`: the logits and groups are of the filtered rows alone.
    `methods` may be fewer (tests): the bound of a row that none answers for stays ABOVE_ALL.
    """
    device, filtered, groups = rows.logits.device, len(rows.slots), rows.groups.shape[1]
    peak_parts, height = rows.peaks.shape[:2]
    parts = -(-vocabulary // window.WINDOW_BLOCK.value)
    numbers = partial(numbers_beside, rows.logits, filtered)
    # 1. the candidates
    bounds = Bounds(numbers(BOUND_FIELDS.value), numbers(LIST_FIELDS.value))
    counts = numbers(candidates.BUCKETS.value, dtype=torch.int32)
    lists = numbers(candidates.CAPACITY.value)
    shape = RowShape(vocabulary, rows.logits.stride(0), groups)
    group_lanes = next_power_of_2(groups)
    common = rows, bounds, shape
    lanes = next_power_of_2(peak_parts), whole, group_lanes
    candidates.choose_floor[filtered,](
        *common, height, peak_parts, counts, *lanes, **options(device, 8)
    )
    candidates.list_candidates[filtered, -(-vocabulary // candidates.BLOCK.value)](
        *common, lists, whole, **options(device, 4)
    )
    if "list" in methods:
        candidates.bound_candidates[filtered,](
            *common, lists, whole, group_lanes, **options(device, 16)
        )
    # 2. the windows of rows that fall through; a program of another row ends at once
    room = WindowRoom(
        numbers(window.WINDOW_FIELDS.value),
        numbers(window.CAPACITY.value),
        numbers(window.RUNS.value, parts, dtype=torch.int32),
    )
    if "window" in methods:
        window.count_buckets[filtered, -(-vocabulary // window.COUNT_BLOCK.value)](
            *common, counts, room.windows, whole, **options(device, 16)
        )
        window.collect_window[filtered, parts](*common, room, whole, **options(device, 8))
    # 3. their bounds
    digits, by = numbers(DIGITS.value), ("window" in methods, "digits" in methods)
    bound_fallbacks[filtered,](
        *common, room, digits, parts, whole, next_power_of_2(parts), *by, **options(device, 16)
    )
    return bounds
