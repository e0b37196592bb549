"""Merging the splits of a sequence in ascending order, inside a program or as its own launch."""

import triton
import triton.language as tl

from tpdet.kernels.cuda.attention_split import (
    PAGE,
    UNSEEN,
    merge,
    merge_factors,
    row_result,
    sees_split,
)


@triton.jit
def merge_in_order(
    split_largest, split_mass, split_total, first, begin, end, part, count, start, window,
    row_count, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Mass [MERGED] and weighted values [MERGED, LANES] over splits [begin, end), ascending.

    `first` is the place of split 0 and row 0 of the part. Past the first-level cache: other
    programs wrote the states. UNROLL splits are loaded ahead of the chain of merges.
    """
    lane = tl.arange(0, LANES)
    row = tl.arange(0, MERGED)
    token = (part * ROWS + row) // GROUP
    live = token < count
    largest = tl.full((MERGED,), UNSEEN, tl.float32)
    mass = tl.zeros((MERGED,), tl.float32)
    total = tl.zeros((MERGED, LANES), tl.float32)
    for group in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            split = group + i + tl.zeros((MERGED,), tl.int32)
            inside = live & (split < end)
            visible = inside & sees_split(split, start + token, window, WINDOW)
            at = first + split.to(tl.int64) * (KEY_HEADS * row_count) + row
            o_at = split_total + at[:, None] * HEAD + lane[None, :]
            o_mask = inside[:, None] & (lane < HEAD)[None, :]
            m = tl.load(split_largest + at, mask=inside, other=UNSEEN, cache_modifier=".cg")
            w = tl.load(split_mass + at, mask=inside, other=0.0, cache_modifier=".cg")
            o = tl.load(o_at, mask=o_mask, other=0.0, cache_modifier=".cg")
            largest, mass, total = merge(largest, mass, total, visible, m, w, o)
    return mass, total


@triton.jit
def store_rows(
    out, mass, total, first_row, part, head, count,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The results of a part's first rows, as many as `total` [R, LANES] has."""
    lane = tl.arange(0, total.shape[1])
    row = part * ROWS + tl.arange(0, total.shape[0])
    token = row // GROUP
    live = token < count
    to = (first_row + token).to(tl.int64) * (KEY_HEADS * GROUP) + head * GROUP + row % GROUP
    result = row_result(mass, total, live).to(out.dtype.element_ty)
    mask = live[:, None] & (lane < HEAD)[None, :]
    tl.store(out + to[:, None] * HEAD + lane[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["window", "row_count", "short_rows"])
def merge_splits(
    out,
    split_largest,
    split_mass,
    split_total,
    short,
    rows,
    window,
    row_count,
    short_rows,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Grid: short [S, 2] x tokens x query heads: one row's splits in ascending order.

    UNROLL splits are loaded ahead of the chain of merges: their loads overlap.
    """
    query_head = tl.program_id(0) % (KEY_HEADS * GROUP)
    work = tl.program_id(0) // (KEY_HEADS * GROUP)
    token = work % short_rows
    sequence = tl.load(short + work // short_rows * 2)
    first_pair = tl.load(short + work // short_rows * 2 + 1)
    first_row = tl.load(rows + sequence * 3)
    count = tl.load(rows + sequence * 3 + 1)
    start = tl.load(rows + sequence * 3 + 2)
    if token < count:
        position = start + token
        lane = tl.arange(0, LANES)
        row = token * GROUP + query_head % GROUP
        at = (first_pair * KEY_HEADS + query_head // GROUP).to(tl.int64) * row_count + row
        end = position // PAGE + 1
        begin = 0
        if WINDOW:
            begin = tl.maximum(position - window + 1, 0) // PAGE
        largest = tl.full((1,), UNSEEN, tl.float32)
        mass = tl.zeros((1,), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for group in range(begin, end, UNROLL):
            for i in tl.static_range(UNROLL):
                split = group + i + tl.arange(0, 1)
                inside = split < end
                visible = inside & sees_split(split, position, window, WINDOW)
                where = at + split.to(tl.int64) * (KEY_HEADS * row_count)
                m = tl.load(split_largest + where, mask=inside, other=UNSEEN)
                w = tl.load(split_mass + where, mask=inside, other=0.0)
                o_at = split_total + where * HEAD + lane
                o = tl.load(o_at, mask=inside & (lane < HEAD), other=0.0)
                raised, a, b = merge_factors(largest, m)
                mass = tl.where(visible, mass * a + w * b, mass)
                total = tl.where(visible, total * a + o * b, total)
                largest = tl.where(visible, raised, largest)
        result = total * tl.div_rn(1.0, mass) + 0.0
        out_at = out + ((first_row + token).to(tl.int64) * (KEY_HEADS * GROUP) + query_head) * HEAD
        tl.store(out_at + lane, result.to(out.dtype.element_ty), mask=lane < HEAD)
