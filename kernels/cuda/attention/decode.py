"""Attention of sequences with few rows in a step: every split a program, merged in order.

    M, P, B  rows of the step, pages, sequences; a token has one row
    Hq, Hkv  query and key heads; GROUP = Hq / Hkv query heads share a key head
    D        lanes of a head (HEAD), LANES with the pad to a power of two
    R        rows of a program (ROWS): a token and a query head of the group each
    q, out, k_pages, v_pages, sinks: `AttentionOperands`; sums are fp32
    rows [B, 3] (first row, tokens, first position), tables [B, widest] (pages): int32
    splits [N, 2] (sequence, split): int32; a split is 256 keys, a tile 64

The workspace holds `SplitStates` for each listed split, key head and row. FUSED, the last program
of a sequence and key head to finish merges all splits of it, in ascending order as always; else the
launch of `merge_splits` follows, whose programs are spread wider.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.attention.merge import merge_in_order, store_rows
from tpdet.kernels.cuda.attention.split import (
    PAGE,
    TILE,
    TILES,
    add_tile,
    add_tile_swapped,
    fresh_state,
    merge,
    row_mass,
    row_state,
    sees,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.pointwise.fp8_rows import load_exponents, numbers_of, page_size


class SplitStates(NamedTuple):
    """States of splits: largest scores and masses [N * Hkv * row_count], total [.., D]; fp32."""

    largest: torch.Tensor
    mass: torch.Tensor
    total: torch.Tensor


class DecodeForm(NamedTuple):
    """What `attend_splits` is compiled for: rows of a program, stages, and as the variant says.

    Of FUSED: MERGED rows of a part may hold tokens; UNROLL splits are loaded ahead of their merge.
    """

    ROWS: int
    STAGES: int
    SWAPPED: bool
    FUSED: bool
    MERGED: int
    UNROLL: int


@triton.jit
def _walk_split(
    query,
    k_page,
    v_page,
    split,
    position,
    low,
    end,
    window,
    scale,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    CAP: tl.constexpr,
):
    """The state of a split for rows [ROWS] at `position`: the least is `low`, the most `end - 1`.

    Tiles without a key that a row sees are skipped: they would leave the state as it is.
    """
    HEAD: tl.constexpr = SHAPE.HEAD
    LANES: tl.constexpr = SHAPE.LANES
    WINDOW: tl.constexpr = SHAPE.WINDOW
    FP8: tl.constexpr = k_page.dtype.element_ty == tl.uint8
    dtype: tl.constexpr = query.dtype
    lane = tl.arange(0, LANES)
    inside = tl.arange(0, TILE)
    first_key = split * PAGE
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(low - window + 1 - first_key, 0) // TILE
    end_tile = tl.minimum((end - first_key + (TILE - 1)) // TILE, TILES)
    m, w, o = fresh_state(FORM.ROWS, LANES)
    if FORM.SWAPPED:
        query, w, o = tl.trans(query), tl.trans(w), tl.trans(o)
    for tile in tl.range(first_tile, end_tile, num_stages=FORM.STAGES):
        # 1. keys of the tile, and whether they are stored
        offset = tile * TILE + inside
        key = first_key + offset
        stored = key < end
        if WINDOW:
            stored = stored & (key > low - window)
        # 2. load K and V, and add the tile to the state
        if FORM.SWAPPED:
            row_at = offset[:, None] * HEAD + lane[None, :]
            mask = stored[:, None] & (lane < HEAD)[None, :]
            k = tl.load(k_page + row_at, mask=mask, other=0)
            v = tl.load(v_page + row_at, mask=mask, other=0)
            if FP8:
                k = numbers_of(k, load_exponents(k_page, offset, stored, HEAD)[:, None], dtype)
                v = numbers_of(v, load_exponents(v_page, offset, stored, HEAD)[:, None], dtype)
            seen = sees(key[:, None], position[None, :], window, WINDOW)
            m, w, o = add_tile_swapped(query, k, tl.trans(v), seen, m, w, o, scale, CAP)
        else:
            k_at = k_page + offset[None, :] * HEAD + lane[:, None]
            v_at = v_page + offset[:, None] * HEAD + lane[None, :]
            k = tl.load(k_at, mask=stored[None, :] & (lane < HEAD)[:, None], other=0)
            v = tl.load(v_at, mask=stored[:, None] & (lane < HEAD)[None, :], other=0)
            if FP8:
                k = numbers_of(k, load_exponents(k_page, offset, stored, HEAD)[None, :], dtype)
                v = numbers_of(v, load_exponents(v_page, offset, stored, HEAD)[:, None], dtype)
            seen = sees(key[None, :], position[:, None], window, WINDOW)
            m, w, o = add_tile(query, k, v, seen, m, w, o, scale, True, CAP)
    if FORM.SWAPPED:
        w, o = tl.trans(w), tl.trans(o)
    return m, w, o


@triton.jit
def _store_state(states, at, m, w, o, live, HEAD: tl.constexpr):
    """Store a split's state at index `at` [R] of the workspace; `live` rows alone."""
    lane = tl.arange(0, o.shape[1])
    tl.store(states.largest + at, m, mask=live)
    tl.store(states.mass + at, row_mass(w), mask=live)
    mask = live[:, None] & (lane < HEAD)[None, :]
    tl.store(states.total + at[:, None] * HEAD + lane[None, :], o, mask=mask)


@triton.jit(do_not_specialize=["widest", "window", "row_count"])
def attend_splits(
    operands,
    states,
    arrivals,
    splits,
    rows,
    tables,
    widest,
    window,
    row_count,
    row_parts,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: splits [N, 2] x row parts x key heads.

    A split that no row of its sequence sees is left unwritten, and no merge reads it. FUSED:
    `arrivals` [B * row parts * Hkv] int32 is zero before and after; a sequence's splits are listed
    one after another from split 0. CAP: of scores, or None.
    """
    await_earlier(DEPENDENT)
    KEY_HEADS: tl.constexpr = SHAPE.KEY_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    ROWS: tl.constexpr = FORM.ROWS
    # 1. this program's key head, part of the rows, and split of a sequence
    head = tl.program_id(0) % KEY_HEADS
    work = tl.program_id(0) // KEY_HEADS
    part = work % row_parts
    pair = work // row_parts
    sequence = tl.load(splits + pair * 2)
    split = tl.load(splits + pair * 2 + 1)
    first_row = tl.load(rows + sequence * 3)
    count = tl.load(rows + sequence * 3 + 1)
    start = tl.load(rows + sequence * 3 + 2)
    number = tl.load(tables + sequence * widest + split)  # before the branch: one wait less
    # 2. the splits that a row of the part sees: [begin, last]
    row = part * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    low = part * ROWS // GROUP
    high = tl.minimum((part * ROWS + ROWS - 1) // GROUP, count - 1)
    begin = 0
    if SHAPE.WINDOW:
        begin = tl.maximum(start + low - window + 1, 0) // PAGE
    last = (start + high) // PAGE
    if (low < count) & (begin <= split) & (split <= last):
        # 3. load q
        lane = tl.arange(0, SHAPE.LANES)
        live = token < count
        column = (head * GROUP + row % GROUP) * HEAD
        mask = live[:, None] & (lane < HEAD)[None, :]
        to = (first_row + token).to(tl.int64)
        q_at = operands.q + to[:, None] * operands.q_stride + column[:, None] + lane[None, :]
        query = tl.load(q_at, mask=mask, other=0.0)
        # 4. the state of the split
        size: tl.constexpr = page_size(operands.k_pages.dtype.element_ty, HEAD)
        page = (number.to(tl.int64) * KEY_HEADS + head) * size
        m, w, o = _walk_split(
            query,
            operands.k_pages + page,
            operands.v_pages + page,
            split,
            start + token,
            start + low,
            start + high + 1,
            window,
            operands.scale,
            SHAPE,
            FORM,
            CAP,
        )
        at = (pair * KEY_HEADS + head).to(tl.int64) * row_count + row
        if FORM.FUSED:
            # 5. the only split: its state is the result
            if begin == last:
                query_head = head * GROUP + row % GROUP
                before, first_mass, nothing = row_state(
                    operands.sinks, query_head, ROWS, SHAPE.LANES, SHAPE.SINKS
                )
                _, mass, total = merge(before, first_mass, nothing, live, m, row_mass(w), o)
                store_rows(operands.out, mass, total, first_row, part, head, count, SHAPE, ROWS)
            else:
                # 6. store the state and arrive
                _store_state(states, at, m, w, o, live, HEAD)
                tl.debug_barrier()  # all of this program's stores come before its arrival
                arrival = arrivals + (sequence * row_parts + part) * KEY_HEADS + head
                if tl.atomic_add(arrival, 1, sem="acq_rel") == last - begin:
                    # 7. the last program to arrive merges all splits
                    tl.store(arrival, 0)
                    first = ((pair - split) * KEY_HEADS + head).to(tl.int64) * row_count
                    mass, total = merge_in_order(
                        states,
                        operands.sinks,
                        first + part * ROWS,
                        begin,
                        last + 1,
                        part,
                        head,
                        count,
                        start,
                        window,
                        row_count,
                        SHAPE,
                        FORM,
                    )
                    store_rows(operands.out, mass, total, first_row, part, head, count, SHAPE, ROWS)
        else:
            _store_state(states, at, m, w, o, live, HEAD)
