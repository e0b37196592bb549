"""Bounds of top-k and top-p on rows for which every guess proved wrong: digit by digit.

A value's place among all, from the largest on, is a number of 33 bits: three digits of 11. A pass
over the row adds what each digit's ids weigh, for ids that have the digits found so far; the digit
at which the threshold is reached is the next. Three passes find the value, whatever the values; one
more the last id kept of those that have it, which weigh alike. Under top-k and top-p the ids from
top-k's bound up are searched again. Sums are of integers, added by atomics: no order matters.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.filter_row import threshold_of
from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import value_of
from tpdet.kernels.cuda.sampling.sort_keys import order_of

DIGITS = 2048


@triton.jit
def values_at(start, first, width, temperature, BLOCK: tl.constexpr):
    """Scaled values of BLOCK columns from `first` on, and their orders; past the end -inf."""
    at = first + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    return x, order_of(x, at), at < width


@triton.jit
def weigh_digits(
    start,
    width,
    temperature,
    top,
    floor,
    digits,
    before,
    shift,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """int64 [DIGITS]: what the ids from the order `floor` up weigh (1, or their mass) by a digit.

    before: the digits above it, as one number; shift: bits below it. digits: room for the sums.
    """
    digit = tl.arange(0, DIGITS)
    tl.debug_barrier()  # what stood there has been read
    tl.store(digits + digit, tl.zeros((DIGITS,), tl.int64))
    tl.debug_barrier()
    for first in range(0, width, BLOCK):
        x, order, there = values_at(start, first, width, temperature, BLOCK)
        weight = tl.full((BLOCK,), 1, tl.int64)
        if BY_MASS:
            weight = fixed_point(x, top)
        place = 2147483647 - (order >> 22)  # of the value: 0 for the largest there is
        mine = there & (order >= floor) & ((place >> (shift + 11)) == before) & (weight != 0)
        tl.atomic_add(digits + ((place >> shift) & (DIGITS - 1)), weight, mask=mine, sem="relaxed")
    tl.debug_barrier()
    return tl.load(digits + digit, cache_modifier=".cg")  # atomics pass by the L1 cache


@triton.jit
def last_of_value(start, width, temperature, floor, key, kept, BLOCK: tl.constexpr):
    """The order of the kept-th lowest id of a value, of those from the order `floor` up."""
    found = tl.full((), -9007199254740992, tl.int64)
    seen = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int32)
    while (first < width) & (seen < kept):
        _, order, there = values_at(start, first, width, temperature, BLOCK)
        mine = there & (order >= floor) & ((order >> 22) == key)
        count = tl.sum(mine.to(tl.int32), axis=0).to(tl.int64)
        if seen + count >= kept:
            last = mine & (tl.cumsum(mine.to(tl.int32), axis=0) == kept - seen)
            found = tl.max(tl.where(last, order, -9007199254740992), axis=0)
        seen += count
        first += BLOCK
    return found


@triton.jit
def search_row(
    start,
    width,
    temperature,
    top,
    floor,
    wanted,
    digits,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """The largest order from which the ids, of those from `floor` up, weigh enough.

    wanted: how many, or P of their own mass.
    """
    before = tl.zeros((), tl.int64)
    missing = wanted.to(tl.int64)
    digit = tl.arange(0, DIGITS)
    shift = tl.full((), 22, tl.int64)
    while shift >= 0:
        weights = weigh_digits(
            start, width, temperature, top, floor, digits, before, shift, BY_MASS, BLOCK, DIGITS
        )
        if BY_MASS & (shift == 22):
            missing = threshold_of(wanted, tl.sum(weights, axis=0))
        place = tl.sum((tl.cumsum(weights, axis=0) < missing).to(tl.int32), axis=0)
        missing -= tl.sum(tl.where(digit < place, weights, 0), axis=0)
        before = before * DIGITS + place
        shift -= 11
    key = 2147483647 - before
    if BY_MASS:
        weight = tl.maximum(fixed_point(value_of(key * 4194304), top), 1)
        missing = (missing + weight - 1) // weight
    return last_of_value(start, width, temperature, floor, key, missing, BLOCK)


@triton.jit
def bound_by_digits(
    start,
    width,
    temperature,
    top,
    top_k,
    numerator,
    digits,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """A row's smallest kept order, over all its ids; digits: int64 [DIGITS], room for sums."""
    bound = tl.full((), -9007199254740992, tl.int64)
    if top_k < width:
        bound = search_row(
            start, width, temperature, top, bound, top_k, digits, False, BLOCK, DIGITS
        )
    if numerator < 1073741824:
        found = search_row(
            start, width, temperature, top, bound, numerator, digits, True, BLOCK, DIGITS
        )
        bound = tl.maximum(bound, found)
    return bound
