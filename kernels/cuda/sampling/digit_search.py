"""Bounds of top-k and top-p on rows for which every guess proved wrong: digit by digit.

The rank of a value among all there are, from the largest on, is a number of 33 bits: three digits
of 11. A pass over the row adds what each digit's ids weigh, for ids that have the digits found so
far; the digit at which the threshold is reached is the next. Three passes find the value, whatever
the values are. One more pass finds the last kept id of those that have it, which weigh alike. Under
top-k and top-p the ids from top-k's bound up are searched again. Sums are of integers, added by
atomics: any order gives the same.

    start   fp32 [width]     a row         BLOCK  columns read at a time
    digits  int64 [DIGITS]   sums by digit
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, threshold_of
from tpdet.kernels.cuda.sampling.sort_keys import (
    KEEPS_ALL,
    KEYS_PER_VALUE,
    MOST_VALUE_KEY,
    sort_key,
    value_key_of,
    value_of,
)

DIGITS = tl.constexpr(2048)
_DIGIT_BITS = tl.constexpr(11)
_FIRST_SHIFT = tl.constexpr(22)  # of the highest of three digits


@triton.jit
def rank_of_value(value_key):
    """The rank of a value among all there are, 0 for the largest; and back."""
    return tl.full((), MOST_VALUE_KEY, tl.int64) - value_key


@triton.jit
def keys_at(start, first, width, temperature, BLOCK: tl.constexpr):
    """Scaled values of BLOCK columns from `first` on, their sort keys, and which are in the row."""
    at = first + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + at, mask=at < width, other=-float("inf")), temperature)
    return x, sort_key(x, at), at < width


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
):
    """int64 [DIGITS]: what ids from the sort key `floor` up weigh (1, or their mass) by a digit.

    before: the digits above it, as one number; shift: bits below it. digits: room for the sums.
    """
    digit = tl.arange(0, DIGITS)
    tl.debug_barrier()  # what stood there has been read
    tl.store(digits + digit, tl.zeros((DIGITS,), tl.int64))
    tl.debug_barrier()
    for first in range(0, width, BLOCK):
        x, key, there = keys_at(start, first, width, temperature, BLOCK)
        weight = tl.full((BLOCK,), 1, tl.int64)
        if BY_MASS:
            weight = fixed_point(x, top)
        rank = rank_of_value(value_key_of(key))
        mine = there & (key >= floor) & ((rank >> (shift + _DIGIT_BITS)) == before) & (weight != 0)
        tl.atomic_add(digits + ((rank >> shift) & (DIGITS - 1)), weight, mask=mine, sem="relaxed")
    tl.debug_barrier()
    return tl.load(digits + digit, cache_modifier=".cg")  # atomics pass by the L1 cache


@triton.jit
def last_of_value(start, width, temperature, floor, value_key, kept, BLOCK: tl.constexpr):
    """The sort key of the kept-th lowest id of a value, of the sort keys from `floor` up."""
    found = tl.full((), KEEPS_ALL, tl.int64)
    seen = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int32)
    while (first < width) & (seen < kept):
        _, key, there = keys_at(start, first, width, temperature, BLOCK)
        mine = there & (key >= floor) & (value_key_of(key) == value_key)
        count = tl.sum(mine.to(tl.int32), axis=0).to(tl.int64)
        if seen + count >= kept:
            last = mine & (tl.cumsum(mine.to(tl.int32), axis=0) == kept - seen)
            found = tl.max(tl.where(last, key, KEEPS_ALL), axis=0)
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
):
    """The largest sort key from which the ids, of those from `floor` up, weigh enough.

    wanted: how many ids, or with BY_MASS the numerator P of their mass.
    """
    before = tl.zeros((), tl.int64)
    missing = wanted.to(tl.int64)
    digit = tl.arange(0, DIGITS)
    # 1. the digits of the value, the highest first
    shift = tl.full((), _FIRST_SHIFT, tl.int64)
    while shift >= 0:
        weights = weigh_digits(
            start, width, temperature, top, floor, digits, before, shift, BY_MASS, BLOCK
        )
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
    return last_of_value(start, width, temperature, floor, value_key, missing, BLOCK)


@triton.jit
def bound_by_digits(start, width, temperature, top, top_k, numerator, digits, BLOCK: tl.constexpr):
    """A row's smallest kept sort key, over all its ids; digits: int64 [DIGITS], room for sums."""
    bound = tl.full((), KEEPS_ALL, tl.int64)
    if top_k < width:
        bound = search_row(start, width, temperature, top, bound, top_k, digits, False, BLOCK)
    if numerator < TOP_P_OFF:
        found = search_row(start, width, temperature, top, bound, numerator, digits, True, BLOCK)
        bound = tl.maximum(bound, found)
    return bound
