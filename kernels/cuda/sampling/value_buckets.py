"""Buckets of a row's values, and where among them a threshold seems to lie.

    position(x) = 48 a spread for the first four spreads below the row's largest, then a sixteenth
                  of that; the last bucket holds the rest
    bucket(x)   = the integer part

Both are monotone, so buckets, and windows between two positions, are runs of sort keys. The spread
is measured for each row (`candidate_list`), so flat rows have fine buckets. Where a threshold seems
to lie is a guess in floating point: it chooses where to look, and no answer depends on it.

    count, bucket  int [BUCKETS]   ids counted in each bucket, and the numbers of the buckets
    x              fp32 [N]        scaled values, none above `top`
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.log_softmax import LOG2_E
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, threshold_of

BUCKETS = tl.constexpr(256)
"""Few: without shared atomics a histogram's cost grows with them (Triton 3.6 counts by votes)."""

_PER_SPREAD = tl.constexpr(48.0)
_FINE = tl.constexpr(192)  # buckets of four spreads
_COARSE_FACTOR = tl.constexpr(16.0)  # how many times wider the buckets after them are
_COARSE_FROM = tl.constexpr(180.0)  # 192 - 192 / 16: where the coarse buckets would begin at 0
_LEAST_SPREAD, _MOST_SPREAD = tl.constexpr(0.01), tl.constexpr(6.0)
_WEIGHT_UNITS = tl.constexpr(2.0**24)  # a weight of 1 as an integer


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
def held_between(count, bucket, low, high):
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
    found = tl.sum((tl.cumsum(mass, axis=0) < reached).to(tl.int32), axis=0)
    return tl.minimum(found, BUCKETS - 2)


@triton.jit
def position_after(count, upto, bucket, wanted):
    """The position above which `wanted` ids are, if the ids of a bucket spread evenly in it."""
    there = tl.minimum(tl.sum((upto <= wanted).to(tl.int32), axis=0), BUCKETS - 1)
    held = held_between(count, bucket, there, there)
    over = wanted - held_between(count, bucket, 0, there - 1)
    within = tl.div_rn(over.to(tl.float32), tl.maximum(held, 1).to(tl.float32))
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
    most = held_between(count, bucket, 0, BUCKETS - 2)
    after = held_between(count, bucket, 0, chosen)
    before = after - held_between(count, bucket, chosen, chosen)
    beside = tl.maximum(ROOM - (after - before), 0) // 2
    apart = (held_between(count, bucket, chosen - 1, chosen - 1) == 0) | (
        held_between(count, bucket, chosen + 1, chosen + 1) == 0
    )
    # 2. the ends that hold them
    low = position_after(count, upto, bucket, before - beside)
    low = tl.minimum(tl.where(apart, tl.ceil(low), low), chosen.to(tl.float32))
    low = tl.where(before <= beside, floor, low)
    high = position_after(count, upto, bucket, after + beside)
    high = tl.maximum(tl.where(apart, tl.floor(high), high), chosen.to(tl.float32) + 1.0)
    return low, tl.where(after + beside >= most, BUCKETS - 1.0, high)
