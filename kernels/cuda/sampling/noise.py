"""What one value of a row comes to: scaled, its integer softmax mass, its Gumbel noise; and the
largest score of a row, fp32(x / T) plus noise, over the ids that are kept.

    m     = max(x)
    q_i   = round_half_even(exp2((x_i - m) * fp32(log2 e)) * 2^40)         fp32, then fp64 to int64
    mass  = q_0 + q_1 + ...                                                int64: any order
    log p_i = fp32( (fp64(x_i) - fp64(m)) - log(fp64(mass) * 2^-40) )

Rounding to an integer is an addition of 1.5 * 2^52 in fp64, after which the integer stands in the
low bits (magnitudes < 2^51).

The noise of an id is two fp64 logarithms, so it is bounded first. Noise lies in [-3.14, 22.88]: an
id that is 32 below the row's largest cannot win. Of the others each lane keeps the one with the
largest *approximate* score (fp32, within 2^-7 of the exact one, `tests/gpu/sampling/bits.py`); an
exact winner's approximation is within `slack` of the largest. So if no lane saw a second one that
near, the exact scores of the lanes' best hold the winner. If a lane did, every id's score is
computed. For example, lanes whose best approximate scores are 9.50, 9.49 and 7.1 and whose second
best are 6.2 and less: the first two are computed exactly and the larger is the answer; had a second
best been 9.48, all would be. Either way the token is the argmax of exact scores, ties to the lowest
id.

    logits  fp32 [R, W], rows `stride` apart      fields  the row's int64 [ROW_FIELDS] of the table
    bounds  int64 [F, BOUND_FIELDS]               part    SPAN columns
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.norm import nearest_integer
from tpdet.kernels.cuda.sampling.peaks import largest_peak, sampled_row, scaled
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BELOW_ALL,
    BOUND,
    BOUND_FIELDS,
    CHOICE,
    COPY,
    KEEPS_ALL,
    KIND,
    MIN_P,
    POSITION,
    RANDOM,
    ROW_FIELDS,
    SAMPLE,
    SAMPLED_PEAK,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    id_of,
    load_float,
    sort_key,
    value_of,
)
from tpdet.kernels.exact import philox
from tpdet.kernels.order import MASS_BITS

LOG2_E = tl.constexpr(1.4426950408889634)
MASS_UNIT = tl.constexpr(2.0**-MASS_BITS)
NOISE_BLOCK = tl.constexpr(1024)
"""Columns whose scores a program computes at a time, at most."""
_MASSES_OF_ONE = tl.constexpr(2.0**MASS_BITS)
_MULTIPLIER_0 = tl.constexpr(philox.MULTIPLIER_0)
_MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_1)
_WEYL_0, _WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_WORD_UNIT = tl.constexpr(2.0**-32)
_ALL_BITS = tl.constexpr(0xFFFFFFFF)
_SERIES_BELOW = tl.constexpr(0.125)  # where the series of -log(1 - v) is near enough
_NOISE_RANGE = tl.constexpr(32.0)  # more than the noise's, with room for the scores' rounding
_SLACK = tl.constexpr(2.0**-5)  # more than twice the error of an approximate score
_ROUNDING = tl.constexpr(0.0001)  # of a value, more than its additions may round off
_HUGE = tl.constexpr(1e30)  # scores beyond it are always computed exactly


@triton.jit
def fixed_point(x, maximum):
    """int64 mass of fp32 logits x against their finite maximum; -inf has none."""
    weight = tl.exp2((x - maximum) * LOG2_E)
    return nearest_integer(weight.to(tl.float64) * _MASSES_OF_ONE)


@triton.jit
def philox_of(ids, counter):
    """Word 0 of Philox4x32-10 for counter (id, position, choice, 0): all uint32.

    counter: (position, choice, low word of the key, high word).
    """
    position, choice, key0, key1 = counter
    c0 = ids.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0) + choice
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(_ROUNDS):
        # 32 by 32 to 64 bits is one instruction; its halves taken apart are two.
        first = c0.to(tl.uint64) * _MULTIPLIER_0
        second = c2.to(tl.uint64) * _MULTIPLIER_1
        high0, low0 = (first >> 32).to(tl.uint32), first.to(tl.uint32)
        high2, low2 = (second >> 32).to(tl.uint32), second.to(tl.uint32)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0 = key0 + tl.full((), _WEYL_0, tl.uint32)
        key1 = key1 + tl.full((), _WEYL_1, tl.uint32)
    return c0


@triton.jit
def gumbel_noise(word):
    """fp32(-log(-log(1 - (word + 0.5) * 2^-32))), logarithms in fp64."""
    survival = 1.0 - (word.to(tl.float64) + 0.5) * _WORD_UNIT
    return (-tl.log(-tl.log(survival))).to(tl.float32)


@triton.jit
def rough_noise(word):
    """fp32 within 2^-8 of `gumbel_noise`; a series where 1 - v is near 1."""
    v = (word.to(tl.float32) + 0.5) * _WORD_UNIT
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    survival = ((word ^ _ALL_BITS).to(tl.float32) + 0.5) * _WORD_UNIT
    return -tl.log(tl.where(v < _SERIES_BELOW, series, -tl.log(survival)))


@triton.jit
def exact_key(x, ids, kept, counter):
    """Sort keys of exact scores; what is not kept is below everything."""
    noise = gumbel_noise(philox_of(ids, counter))
    nothing = tl.full(x.shape, BELOW_ALL, tl.int64)
    return tl.where(kept, sort_key(x + noise, ids), nothing)


@triton.jit
def counter_of(fields):
    """A row's position and choice, and the two words of its key: the generator's, uint32."""
    key0, key1 = tl.load(fields + SEED_LOW).to(tl.uint32), tl.load(fields + SEED_HIGH).to(tl.uint32)
    position = tl.load(fields + POSITION).to(tl.uint32)
    return position, tl.load(fields + CHOICE).to(tl.uint32), key0, key1


@triton.jit
def kept_values(start, at, width, first_id, temperature, bound, last_id, least):
    """Scaled values of columns, their ids and which may win: from `bound` up, ids to `last_id`."""
    raw = tl.load(start + at, mask=at < width, other=-float("inf"))
    x = scaled(raw, temperature)
    ids = first_id + at
    kept = (at < width) & (x >= least)
    kept &= (x > bound) | ((x == bound) & (ids <= last_id))
    return x, ids, kept


@triton.jit
def best_score(start, width, first_id, fields, temperature, top, bound, SPAN: tl.constexpr):
    """The largest sort key of the scores of the program's SPAN columns; BELOW_ALL: none is kept."""
    part = tl.program_id(1)
    LANES: tl.constexpr = min(SPAN, NOISE_BLOCK)
    # 1. the generator's counter and key, and the smallest value that may win
    counter = counter_of(fields)
    least = top + load_float(fields + MIN_P)
    least = tl.maximum(least, top - _NOISE_RANGE - tl.abs(top) * _ROUNDING)
    last_id = id_of(bound)
    bound = tl.where(bound == KEEPS_ALL, -float("inf"), value_of(bound))
    # 2. each lane's best approximate score, and the second best
    best = tl.full((LANES,), -float("inf"), tl.float32)
    second = best
    best_x = best
    best_id = tl.zeros((LANES,), tl.int32)
    for first in range(0, SPAN, LANES):
        at = part * SPAN + first + tl.arange(0, LANES)
        x, ids, kept = kept_values(start, at, width, first_id, temperature, bound, last_id, least)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            rough = x + rough_noise(philox_of(ids, counter))
            rough = tl.where(kept, rough, -float("inf"))
            better = rough > best
            second = tl.maximum(second, tl.minimum(best, rough))
            best_x = tl.where(better, x, best_x)
            best_id = tl.where(better, ids, best_id)
            best = tl.where(better, rough, best)
    # 3. exact scores of the lanes' best that may win
    result = tl.full((), BELOW_ALL, tl.int64)
    peak = tl.max(best, axis=0)
    if peak > -float("inf"):
        slack = tl.abs(peak) * _ROUNDING + _SLACK
        doubtful = (tl.abs(peak) > _HUGE) | (tl.max(second, axis=0) >= peak - slack)
        scores = exact_key(best_x, best_id, best >= peak - slack, counter)
        # 4. exact scores of all kept ids, where a lane's second best may win
        if doubtful:
            for first in range(0, SPAN, LANES):
                at = part * SPAN + first + tl.arange(0, LANES)
                x, ids, kept = kept_values(
                    start, at, width, first_id, temperature, bound, last_id, least
                )
                scores = tl.maximum(scores, exact_key(x, ids, kept, counter))
        result = tl.max(scores, axis=0)
    return result


@triton.jit
def sample_of_part(rows, bounds, shape, count, first_id, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """The largest sort key of a kept id's score in a part of a random row; BELOW_ALL of others.

    bounds: of `find_bounds`. A sample that stands there is taken over. Program (row, part).
    """
    row = tl.program_id(0)
    fields = rows.table + row * ROW_FIELDS
    result = tl.full((), BELOW_ALL, tl.int64)
    if tl.load(fields + KIND) == RANDOM:
        slot = tl.load(fields + SLOT)
        bound = tl.load(bounds + slot * BOUND_FIELDS + BOUND, mask=slot >= 0, other=KEEPS_ALL)
        result = tl.load(bounds + slot * BOUND_FIELDS + SAMPLE, mask=slot >= 0, other=ABOVE_ALL)
        if result == ABOVE_ALL:
            start = sampled_row(rows, shape, row, tl.load(fields + COPY))
            temperature = load_float(fields + TEMPERATURE)
            peak = value_of(largest_peak(rows.peaks + SAMPLED_PEAK, row, count, PARTS))
            top = scaled(peak, temperature)
            result = best_score(start, shape.width, first_id, fields, temperature, top, bound, SPAN)
    return result
