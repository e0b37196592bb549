"""Buckets of a row's values, and where among them a threshold seems to lie.

    position(x) = 48 a spread for the first four spreads below the row's largest, then a sixteenth
                  of that; the last bucket holds the rest
    bucket(x)   = the integer part

Both are monotone, so buckets, and windows between two positions, are runs of the total order. The
spread is the row's own (`filter_top`), so flat rows have fine buckets. What is told of a threshold
is a guess in floating point: it says where to look, and no answer depends on it.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.filter_row import threshold_of

BUCKETS = 256
"""Few: without shared atomics a histogram's cost grows with them (Triton 3.6 counts by votes)."""


@triton.jit
def unit_of(spread_bits):
    """Buckets a unit of scaled value, from the bits of a row's spread."""
    spread = spread_bits.to(tl.int32).to(tl.float32, bitcast=True)
    # Without a spread (groups whose largest are tied) the row tells no width: the widest.
    return tl.div_rn(48.0, tl.where((spread > 0.01) & (spread < 6.0), spread, 6.0))


@triton.jit
def position_of(x, top, unit, BUCKETS: tl.constexpr):
    """fp32 position of scaled values below their row's largest; its integer part is the bucket."""
    below = (top - x) * unit
    below = tl.where(below < 192.0, below, 180.0 + below * 0.0625)
    return tl.minimum(tl.maximum(below, 0.0), BUCKETS - 1.0)


@triton.jit
def bucket_at(position, BUCKETS: tl.constexpr):
    """int32 bucket of a position, whatever it is."""
    return tl.minimum(tl.maximum(position.to(tl.int32), 0), BUCKETS - 1)


@triton.jit
def held_between(count, bucket, low, high):
    """Ids counted in the buckets from low to high."""
    return tl.sum(tl.where((bucket >= low) & (bucket <= high), count, 0), axis=0)


@triton.jit
def place_by_mass(count, bucket, missing, rest, unit, BUCKETS: tl.constexpr):
    """The bucket at whose end `missing` of the mass `rest` seems to lie: a guess, to be checked.

    rest, missing: int64, of the ids that are counted. A bucket weighs about its count times the
    weight at its middle. Its own total is the measure: what all buckets get wrong cancels.
    """
    middle = bucket.to(tl.float32) + 0.5
    middle = tl.where(bucket < 192, middle, middle * 16.0 - 2880.0)
    weight = (tl.exp2(tl.div_rn(middle, unit) * -1.4426950408889634) * 16777216.0).to(tl.int64)
    # The last bucket holds -inf, padding and the listed too, so its count tells nothing.
    mass = tl.where(bucket < BUCKETS - 1, count.to(tl.int64) * weight, 0)
    share = tl.div_rn(missing.to(tl.float32), tl.maximum(rest, 1).to(tl.float32))
    numerator = (tl.minimum(tl.maximum(share, 0.0), 1.0) * 1073741824.0).to(tl.int64)
    reached = threshold_of(numerator, tl.sum(mass, axis=0))
    place = tl.sum((tl.cumsum(mass, axis=0) < reached).to(tl.int32), axis=0)
    return tl.minimum(place, BUCKETS - 2)


@triton.jit
def position_after(count, upto, bucket, wanted, BUCKETS: tl.constexpr):
    """The position above which `wanted` ids are, if those of a bucket spread evenly in it."""
    there = tl.minimum(tl.sum((upto <= wanted).to(tl.int32), axis=0), BUCKETS - 1)
    held = held_between(count, bucket, there, there)
    over = wanted - held_between(count, bucket, 0, there - 1)
    within = tl.div_rn(over.to(tl.float32), tl.maximum(held, 1).to(tl.float32))
    position = there.to(tl.float32) + tl.minimum(tl.maximum(within, 0.0), 1.0)
    return tl.minimum(position, BUCKETS - 1.0)


@triton.jit
def window_about(count, bucket, place, floor, ROOM: tl.constexpr, BUCKETS: tl.constexpr):
    """(first position, the one after the last) of a bucket and as many ids beside it as fit.

    floor: the first position that may be taken. Where a neighbour is empty, values are tied and do
    not spread: then no bucket is cut.
    """
    upto = tl.cumsum(count, axis=0)
    most = held_between(count, bucket, 0, BUCKETS - 2)
    after = held_between(count, bucket, 0, place)
    before = after - held_between(count, bucket, place, place)
    beside = tl.maximum(ROOM - (after - before), 0) // 2
    apart = (held_between(count, bucket, place - 1, place - 1) == 0) | (
        held_between(count, bucket, place + 1, place + 1) == 0
    )
    low = position_after(count, upto, bucket, before - beside, BUCKETS)
    low = tl.minimum(tl.where(apart, tl.ceil(low), low), place.to(tl.float32))
    low = tl.where(before <= beside, floor, low)
    high = position_after(count, upto, bucket, after + beside, BUCKETS)
    high = tl.maximum(tl.where(apart, tl.floor(high), high), place.to(tl.float32) + 1.0)
    return low, tl.where(after + beside >= most, BUCKETS - 1.0, high)
