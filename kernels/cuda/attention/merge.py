"""Merging the splits of a sequence, ascending, in the program that ended the last of them.

Shapes are those of `decode.py`; MERGED is the rows of a part that may hold tokens, at most R.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.attention.split import (
    UNSEEN,
    merge,
    row_result,
    row_state,
    sees_split,
)


@triton.jit
def merge_in_order(
    states,
    sinks,
    first,
    begin,
    end,
    part,
    head,
    count,
    start,
    window,
    row_count,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Mass [MERGED] and weighted values [MERGED, LANES] over splits [begin, end), ascending.

    `first` is the index of split 0 and row 0 of the part. Loads pass by the first-level cache, as
    other programs wrote the states. UNROLL splits are loaded ahead of the chain of merges.
    """
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    MERGED: tl.constexpr = FORM.MERGED
    UNROLL: tl.constexpr = FORM.UNROLL
    lane = tl.arange(0, SHAPE.LANES)
    row = tl.arange(0, MERGED)
    token = (part * FORM.ROWS + row) // GROUP
    live = token < count
    query_head = head * GROUP + (part * FORM.ROWS + row) % GROUP
    largest, mass, total = row_state(sinks, query_head, MERGED, SHAPE.LANES, SHAPE.SINKS)
    for group in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            split = group + i + tl.zeros((MERGED,), tl.int32)
            inside = live & (split < end)
            visible = inside & sees_split(split, start + token, window, SHAPE.WINDOW)
            at = first + split.to(tl.int64) * (SHAPE.KEY_HEADS * row_count) + row
            o_at = states.total + at[:, None] * HEAD + lane[None, :]
            o_mask = inside[:, None] & (lane < HEAD)[None, :]
            m = tl.load(states.largest + at, mask=inside, other=UNSEEN, cache_modifier=".cg")
            w = tl.load(states.mass + at, mask=inside, other=0.0, cache_modifier=".cg")
            o = tl.load(o_at, mask=o_mask, other=0.0, cache_modifier=".cg")
            largest, mass, total = merge(largest, mass, total, visible, m, w, o)
    return mass, total


@triton.jit
def store_rows(
    out,
    mass,
    total,
    first_row,
    part,
    head,
    count,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The results of a part's first rows, as many as `total` [R, LANES] has."""
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    lane = tl.arange(0, total.shape[1])
    row = part * ROWS + tl.arange(0, total.shape[0])
    token = row // GROUP
    live = token < count
    to = (first_row + token).to(tl.int64) * (SHAPE.KEY_HEADS * GROUP) + head * GROUP + row % GROUP
    result = row_result(mass, total, live).to(out.dtype.element_ty)
    mask = live[:, None] & (lane < HEAD)[None, :]
    tl.store(out + to[:, None] * HEAD + lane[None, :], result, mask=mask)
