"""Searches among the sort keys or values that one program holds: exact bounds, rough floors.

A range of sort keys is narrowed by three trial points at once, until one key is left. One point
halves the range of keys, so that the search ends within 54 rounds whatever the values. The two
others cut the range of values in three, which ends within a few rounds where values spread evenly.
Both ends then move onto keys that are there. Where one value is left, its ids are cut in three.
Sums are of integers, so the points and their number cannot be seen in the result.

    N  sort keys or values of a program
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.sort_keys import (
    ABOVE_ALL,
    FLOAT32_MOST,
    least_key,
    value_key_of,
    value_of,
)

_ONE_THIRD = tl.constexpr(0.33333334)
_TWO_THIRDS = tl.constexpr(0.6666667)
_COUNT_BITS = tl.constexpr(20)  # three counts below 2^20 stand in one int64
_COUNT_MASK = tl.constexpr((1 << 20) - 1)
_TRIALS = tl.constexpr(16)


@triton.jit
def trial_point(low, high, share, third):
    """A point in (low, high], low < high: by value where the ends' differ, by id where not."""
    bottom = tl.maximum(value_of(low), -FLOAT32_MOST)
    by_value = least_key(bottom * (1.0 - share) + value_of(high) * share)
    by_id = low + (high - low) // 3 * third
    point = tl.where(value_key_of(low) == value_key_of(high), by_id, by_value)
    return tl.minimum(tl.maximum(point, low + 1), high)


@triton.jit
def heaviest_bound(keys, weights, threshold):
    """The largest of `keys` such that the keys from it up weigh `threshold`.

    keys, weights: int64 [N]. A key without weight is not there. All together weigh at least
    `threshold` > 0. Only sums, minima and maxima are taken: how the list is arranged is free.
    """
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
