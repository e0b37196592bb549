"""The largest order whose followers weigh enough, among a program's own orders.

A range of orders is narrowed by three trial points at once, until one order is left. One point
halves the range of keys, so that it ends within 54 rounds whatever the values; two cut the range of
values in three, which ends within a few rounds where values spread evenly; both ends then move onto
orders that are there. Where one value is left, its ids are cut in three. Sums are of integers, so
points and their number cannot be seen in the result.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.row_scan import value_of


@triton.jit
def least_order(value):
    """The order below all ids of an fp32 value, and above those of every smaller one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4194304


@triton.jit
def trial_point(low, high, share, third):
    """A point in (low, high], low < high: by value where the ends' differ, by id where not."""
    bottom = tl.maximum(value_of(low), -3.4028234663852886e38)
    by_value = least_order(bottom * (1.0 - share) + value_of(high) * share)
    by_id = low + (high - low) // 3 * third
    point = tl.where((low >> 22) == (high >> 22), by_id, by_value)
    return tl.minimum(tl.maximum(point, low + 1), high)


@triton.jit
def heaviest_bound(orders, weights, threshold):
    """The largest of `orders` such that those from it up weigh `threshold`.

    orders, weights: int64 [N]; what has no weight is not there; all of them weigh `threshold` > 0.
    Sum, minimum and maximum are all it takes: no order of the list matters.
    """
    none = tl.full(orders.shape, 4611686018427387904, tl.int64)
    low = tl.min(tl.where(weights > 0, orders, none), axis=0)
    high = tl.max(tl.where(weights > 0, orders, -none), axis=0)
    while low < high:
        first = trial_point(low, high, 0.33333334, 1)
        last = trial_point(low, high, 0.6666667, 2)
        middle = low + ((high - low + 1) >> 1)
        point1 = tl.minimum(middle, tl.minimum(first, last))
        point3 = tl.maximum(middle, tl.maximum(first, last))
        point2 = tl.maximum(tl.minimum(first, last), tl.minimum(middle, tl.maximum(first, last)))
        reached1 = tl.sum(tl.where(orders >= point1, weights, 0), axis=0) >= threshold
        reached2 = tl.sum(tl.where(orders >= point2, weights, 0), axis=0) >= threshold
        reached3 = tl.sum(tl.where(orders >= point3, weights, 0), axis=0) >= threshold
        bottom = tl.where(reached1, point1, low)
        bottom = tl.where(reached2, point2, bottom)
        bottom = tl.where(reached3, point3, bottom)
        top = tl.where(reached3, high, point3 - 1)
        top = tl.where(reached2, top, point2 - 1)
        top = tl.where(reached1, top, point1 - 1)
        left = (weights > 0) & (orders >= bottom) & (orders <= top)
        low = tl.min(tl.where(left, orders, none), axis=0)
        high = tl.max(tl.where(left, orders, -none), axis=0)
    return high


@triton.jit
def reaching_three(values, point1, point2, point3):
    """How many of fp32 [N] reach each of three points, by one sum; N < 2^20."""
    both = (values >= point1).to(tl.int64) + ((values >= point2).to(tl.int64) << 20)
    counts = tl.sum(both + ((values >= point3).to(tl.int64) << 40), axis=0)
    return counts & 1048575, (counts >> 20) & 1048575, counts >> 40


@triton.jit
def rough_floor(values, wanted, finite):
    """A value that `wanted` of `values` at least reach, and as few more as a few trials give.

    values: fp32 [N], N < 2^20, what is not there is -inf; `finite` of them are, at least `wanted`.
    """
    low = tl.min(tl.where(values > -float("inf"), values, float("inf")), axis=0)
    high = tl.max(values, axis=0)
    count = finite.to(tl.int64)
    enough = wanted + wanted // 4 + 8
    trials = 0
    while (trials < 16) & (count > enough):
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
