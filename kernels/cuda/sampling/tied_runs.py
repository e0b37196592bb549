"""The bound of top-k or top-p inside a run: more ids of one value than a window lists.

The ids of a run weigh alike, so how many of its lowest ids are kept follows from their number by a
division. Where the last of them stands follows from the numbers in parts of the row.

    runs      int64 [RUNS, RUN_FIELDS]   up to three runs, from the largest value on
    run_parts int32 [RUNS, parts]        ids of each run in each BLOCK of the row
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, threshold_of
from tpdet.kernels.cuda.sampling.sort_keys import (
    KEEPS_ALL,
    KEYS_PER_VALUE,
    sort_key,
    value_key_of,
    value_of,
)

RUNS = tl.constexpr(3)
RUN_IDS = tl.constexpr(0)
RUN_LEAST = tl.constexpr(1)  # the least and the largest value key: they differ in a wrong guess
RUN_MOST = tl.constexpr(2)
RUN_FIELDS = tl.constexpr(3)


@triton.jit
def enough_of_runs(runs, top, vocabulary, top_k, numerator, above, mass, total):
    """(run, how many of its lowest ids are kept, its value key); -1 ids where the window was wrong.

    Under top-k there is the middle run alone, and under top-k and top-p it begins at the top.
    above, mass: of the ids above the runs; total: the mass of the row.
    """
    kept = tl.full((), -1, tl.int64)
    kept_key = kept
    kept_run = tl.full((), 1, tl.int32)
    sought = (top_k < vocabulary) | (threshold_of(numerator, total) > mass)
    for run in tl.static_range(RUNS):
        # 1. the run: how many ids, of which value, and of which weight
        count = tl.load(runs + RUN_FIELDS * run + RUN_IDS)
        value_key = tl.load(runs + RUN_FIELDS * run + RUN_LEAST)
        single = value_key == tl.load(runs + RUN_FIELDS * run + RUN_MOST)
        weight = fixed_point(value_of(value_key * KEYS_PER_VALUE), top)
        # 2. how many of them the filters want
        wanted = count
        if top_k < vocabulary:
            wanted = top_k - above
            total = wanted * weight
        if numerator < TOP_P_OFF:
            missing = threshold_of(numerator, total) - mass
            needed = (missing + weight - 1) // tl.maximum(weight, 1)
            needed = tl.where((missing <= 0) | (weight <= 0), count + 1, needed)
            wanted = tl.where(top_k < vocabulary, tl.minimum(wanted, needed), needed)
        # 3. the first run that has as many
        sought &= (count == 0) | single
        here = sought & (count > 0) & (wanted > 0) & (wanted <= count)
        kept = tl.where(here, wanted, kept)
        kept_key = tl.where(here, value_key, kept_key)
        kept_run = tl.where(here, run, kept_run)
        sought &= here == 0
        mass += tl.where(count > 0, count * weight, 0)
    return kept_run, kept, kept_key


@triton.jit
def key_in_run(
    start,
    width,
    temperature,
    value_key,
    run_parts,
    parts,
    kept,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The sort key of the kept-th lowest id whose scaled value has `value_key`."""
    # 1. the part of the row in which it stands, and which one of that part's ids it is
    at = tl.arange(0, PARTS)
    count = tl.load(run_parts + at, mask=at < parts, other=0).to(tl.int64)
    upto = tl.cumsum(count, axis=0)
    part = tl.sum(((upto < kept) & (at < parts)).to(tl.int32), axis=0)
    nth = kept - tl.sum(tl.where(at < part, count, 0), axis=0)
    # 2. the id
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = scaled(tl.load(start + ids, mask=ids < width, other=-float("inf")), temperature)
    key = sort_key(x, ids)
    equal = (value_key_of(key) == value_key) & (ids < width)
    wanted = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == nth)
    return tl.max(tl.where(wanted, key, KEEPS_ALL), axis=0)
