"""The bound of top-k or top-p inside a run: more ids of one value than a window lists.

The ids of a run weigh alike, so how many of its lowest are kept follows from their number by a
division; where the last of them stands, from the numbers in parts of the row.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.filter_row import threshold_of
from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import value_of
from tpdet.kernels.cuda.sampling.sort_keys import order_of


@triton.jit
def enough_of_runs(runs, top, vocabulary, top_k, numerator, above, mass, total):
    """(run, how many of its lowest ids are kept, its key); -1 kept where the window was wrong.

    runs: of up to three, from the largest value on, ids, least key, largest key. Under top-k there
    is the middle one alone, and under top-k and top-p it begins at the top.
    """
    kept = tl.full((), -1, tl.int64)
    kept_key = kept
    kept_run = tl.full((), 1, tl.int32)
    sought = (top_k < vocabulary) | (threshold_of(numerator, total) > mass)
    for run in tl.static_range(3):
        count, key = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
        single = key == tl.load(runs + 3 * run + 2)
        weight = fixed_point(value_of(key * 4194304), top)
        wanted = count
        if top_k < vocabulary:
            wanted = top_k - above
            total = wanted * weight
        if numerator < 1073741824:
            missing = threshold_of(numerator, total) - mass
            needed = (missing + weight - 1) // tl.maximum(weight, 1)
            needed = tl.where((missing <= 0) | (weight <= 0), count + 1, needed)
            wanted = tl.where(top_k < vocabulary, tl.minimum(wanted, needed), needed)
        sought &= (count == 0) | single
        here = sought & (count > 0) & (wanted > 0) & (wanted <= count)
        kept = tl.where(here, wanted, kept)
        kept_key = tl.where(here, key, kept_key)
        kept_run = tl.where(here, run, kept_run)
        sought &= here == 0
        mass += tl.where(count > 0, count * weight, 0)
    return kept_run, kept, kept_key


@triton.jit
def order_in_run(
    start,
    width,
    temperature,
    key,
    parts_of,
    parts,
    kept,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The order of the kept-th lowest id whose scaled value has `key`."""
    at = tl.arange(0, PARTS)
    count = tl.load(parts_of + at, mask=at < parts, other=0).to(tl.int64)
    upto = tl.cumsum(count, axis=0)
    part = tl.sum(((upto < kept) & (at < parts)).to(tl.int32), axis=0)
    left = kept - tl.sum(tl.where(at < part, count, 0), axis=0)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + ids, mask=ids < width, other=-float("inf")), temperature)
    order = order_of(x, ids)
    equal = ((order >> 22) == key) & (ids < width)
    wanted = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == left)
    return tl.max(tl.where(wanted, order, -9007199254740992), axis=0)
