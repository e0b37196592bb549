"""The largest score of each row: fp32(x / T) plus Gumbel noise, over the ids that are kept.

Noise is two fp64 logarithms an id, so it is bounded first. Noise lies in [-3.14, 22.88]: an id that
is 32 below the row's largest cannot win. Of the others each lane keeps the one with the largest
*approximate* score (fp32, within 2^-7 of the exact one, `tests/gpu/sampler.py`); an exact winner's
approximation is within `slack` of the largest. So if no lane saw a second one that near, the exact
scores of the lanes' best hold the winner, and if one did, every id's is computed. Either way the
token is the argmax of exact scores, ties to the lowest id.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.row_scan import largest, source, value_of
from tpdet.kernels.cuda.sampling.sort_keys import order_of


@triton.jit
def scaled(x, temperature):
    """x / T with overflow held at the largest finite fp32; -inf stays; zeros are +0.0."""
    y = tl.div_rn(x, temperature)
    y = tl.minimum(tl.maximum(y, -3.4028234663852886e38), 3.4028234663852886e38)
    y = tl.where(x == -float("inf"), x, y)
    return tl.where(y == 0.0, 0.0, y)


@triton.jit
def philox_of(ids, position, choice, key0, key1):
    """Word 0 of Philox4x32-10 for counter (id, position, choice, 0): all uint32."""
    c0 = ids.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0) + choice
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        # 32 by 32 to 64 bits is one instruction; its halves taken apart are two.
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        high0, low0 = (first >> 32).to(tl.uint32), first.to(tl.uint32)
        high2, low2 = (second >> 32).to(tl.uint32), second.to(tl.uint32)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0 = key0 + tl.full((), 0x9E3779B9, tl.uint32)
        key1 = key1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0


@triton.jit
def gumbel_noise(word):
    """fp32(-log(-log(1 - (word + 0.5) * 2^-32))), logarithms in fp64."""
    survival = 1.0 - (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(survival))).to(tl.float32)


@triton.jit
def rough_noise(word):
    """fp32 within 2^-8 of `gumbel_noise`; a series where 1 - v is near 1."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    survival = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -tl.log(tl.where(v < 0.125, series, -tl.log(survival)))


@triton.jit
def exact_order(x, ids, kept, position, choice, key0, key1):
    """Orders of exact scores; what is not kept is below everything."""
    noise = gumbel_noise(philox_of(ids, position, choice, key0, key1))
    nothing = tl.full(x.shape, -4611686018427387904, tl.int64)
    return tl.where(kept, order_of(x + noise, ids), nothing)


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
def best_score(
    start,
    part,
    width,
    first_id,
    fields,
    temperature,
    top,
    bound,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest order of the scores of SPAN columns; -2^62 if none is kept."""
    key0, key1 = tl.load(fields).to(tl.uint32), tl.load(fields + 1).to(tl.uint32)
    position, choice = tl.load(fields + 2).to(tl.uint32), tl.load(fields + 3).to(tl.uint32)
    least = top + tl.load(fields + 8).to(tl.int32).to(tl.float32, bitcast=True)
    least = tl.maximum(least, top - 32.0 - tl.abs(top) * 0.0001)
    last_id = (4194303 - (bound & 4194303)).to(tl.int32)
    bound = tl.where(bound == -9007199254740992, -float("inf"), value_of(bound))
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    second = best
    best_x = best
    best_id = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SPAN, BLOCK):
        at = part * SPAN + first + tl.arange(0, BLOCK)
        x, ids, kept = kept_values(start, at, width, first_id, temperature, bound, last_id, least)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            rough = x + rough_noise(philox_of(ids, position, choice, key0, key1))
            rough = tl.where(kept, rough, -float("inf"))
            better = rough > best
            second = tl.maximum(second, tl.minimum(best, rough))
            best_x = tl.where(better, x, best_x)
            best_id = tl.where(better, ids, best_id)
            best = tl.where(better, rough, best)
    result = tl.full((), -4611686018427387904, tl.int64)
    peak = tl.max(best, axis=0)
    if peak > -float("inf"):
        slack = 0.03125 + tl.abs(peak) * 0.0001
        doubtful = (tl.abs(peak) > 1e30) | (tl.max(second, axis=0) >= peak - slack)
        found = exact_order(best_x, best_id, best >= peak - slack, position, choice, key0, key1)
        if doubtful:
            for first in range(0, SPAN, BLOCK):
                at = part * SPAN + first + tl.arange(0, BLOCK)
                x, ids, kept = kept_values(
                    start, at, width, first_id, temperature, bound, last_id, least
                )
                found = tl.maximum(found, exact_order(x, ids, kept, position, choice, key0, key1))
        result = tl.max(found, axis=0)
    return result


@triton.jit
def sample_of_part(
    logits,
    copies,
    table,
    peaks,
    bounds,
    row,
    part,
    rows,
    width,
    first_id,
    stride,
    peak_parts,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The largest order of a kept id's score in a part of a random row; -2^62 of other rows.

    bounds: int64 [F, 2] of `find_bounds`. A sample that stands there is taken over.
    """
    fields = table + row * FIELDS
    result = tl.full((), -4611686018427387904, tl.int64)
    if tl.load(fields + 5) == 1:
        slot = tl.load(fields + 10)
        bound = tl.load(bounds + slot * 2, mask=slot >= 0, other=-9007199254740992)
        result = tl.load(bounds + slot * 2 + 1, mask=slot >= 0, other=4611686018427387904)
        if result == 4611686018427387904:
            start = source(logits, copies, row, tl.load(fields + 9), stride, width)
            temperature = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
            peak = value_of(largest(peaks + 1, row, rows, peak_parts, 2, PARTS))
            result = best_score(
                start,
                part,
                width,
                first_id,
                fields,
                temperature,
                scaled(peak, temperature),
                bound,
                SPAN,
                BLOCK,
            )
    return result
