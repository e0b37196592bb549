"""Attention of sequences with many rows in a step: one program walks all keys of its rows.

M, P, B  rows of the step, pages, sequences; a token has one row
Hq, Hkv  query and key heads; GROUP = Hq / Hkv query heads share a key head
D        lanes of a head (HEAD), LANES with the pad to a power of two
R        rows of a program (ROWS): a token and a query head of the group each
q, out, k_pages, v_pages, sinks: `AttentionOperands`; sums are fp32
rows [B, 3] (first row, tokens, first position), tables [B, widest] (pages): int32
blocks [T, 2] (sequence, first token): int32
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpdet.kernels.cuda.attention.split import (
    PAGE,
    TILE,
    TILES,
    add_tile,
    fresh_state,
    merge,
    row_mass,
    row_result,
    row_state,
    sees,
    sees_split,
)
from tpdet.kernels.cuda.pointwise.fp8_rows import load_exponents, numbers_of, page_size


class PrefillForm(NamedTuple):
    """What `attend_blocks` is compiled for: tokens of a block, rows of a program, stages.

    DESCRIPTORS: k_tiles and v_tiles are the pages as [P * Hkv * 256, D] in blocks of [64, LANES];
    else not read.
    """

    DESCRIPTORS: bool
    BLOCK: int
    ROWS: int
    STAGES: int


@triton.jit
def _walk_tiles(
    operands,
    k_tiles,
    v_tiles,
    query,
    table,
    head,
    first_tile,
    end_tile,
    position,
    length,
    window,
    state,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    MASK: tl.constexpr,
    CAP: tl.constexpr,
):
    """Tiles [first_tile, end_tile) onto the row state; a split merges before the next begins.

    Not MASK: every row sees every key of these tiles, and they are whole splits. The merge stands
    at the start of the loop: at its end ptxas serialises the wgmma instructions (C7515).
    """
    HEAD: tl.constexpr = SHAPE.HEAD
    LANES: tl.constexpr = SHAPE.LANES
    WINDOW: tl.constexpr = SHAPE.WINDOW
    ROWS: tl.constexpr = FORM.ROWS
    FP8: tl.constexpr = operands.k_pages.dtype.element_ty == tl.uint8
    SIZE: tl.constexpr = page_size(operands.k_pages.dtype.element_ty, HEAD)
    largest, mass, total = state
    lane = tl.arange(0, LANES)
    inside = tl.arange(0, TILE)
    m, w, o = fresh_state(ROWS, LANES)
    for tile in tl.range(first_tile, end_tile, num_stages=FORM.STAGES):
        # 1. where the tile lies
        split = tile // TILES
        number = tl.load(table + split)
        page = (number.to(tl.int64) * SHAPE.KEY_HEADS + head) * SIZE
        offset = (tile - split * TILES) * TILE + inside
        key = tile * TILE + inside
        k_at = operands.k_pages + page + offset[None, :] * HEAD + lane[:, None]
        v_at = operands.v_pages + page + offset[:, None] * HEAD + lane[None, :]
        # 2. load K and V
        if MASK:
            stored = key < length
            k = tl.load(k_at, mask=stored[None, :] & (lane < HEAD)[:, None], other=0)
            v = tl.load(v_at, mask=stored[:, None] & (lane < HEAD)[None, :], other=0)
            seen = sees(key[None, :], position[:, None], window, WINDOW)
        else:
            if FORM.DESCRIPTORS:
                at = (number * SHAPE.KEY_HEADS + head) * PAGE + (tile - split * TILES) * TILE
                k = k_tiles.load([at, 0]).T
                v = v_tiles.load([at, 0])
            elif LANES == HEAD:
                k = tl.load(k_at)
                v = tl.load(v_at)
            else:
                k = tl.load(k_at, mask=(lane < HEAD)[:, None], other=0)
                v = tl.load(v_at, mask=(lane < HEAD)[None, :], other=0)
            stored = tl.full((TILE,), True, tl.int1)
            seen = False
        if FP8:
            k_exponent = load_exponents(operands.k_pages + page, offset, stored, HEAD)
            v_exponent = load_exponents(operands.v_pages + page, offset, stored, HEAD)
            k = numbers_of(k, k_exponent[None, :], query.dtype)
            v = numbers_of(v, v_exponent[:, None], query.dtype)
        # 3. a finished split merges before the next begins
        if (tile > first_tile) & (tile - split * TILES == 0):
            visible = tl.full((ROWS,), True, tl.int1)
            if MASK:
                visible = sees_split(split - 1, position, window, WINDOW)
            largest, mass, total = merge(largest, mass, total, visible, m, row_mass(w), o)
            m, w, o = fresh_state(ROWS, LANES)
        # 4. add the tile to the split's state
        m, w, o = add_tile(query, k, v, seen, m, w, o, operands.scale, MASK, CAP)
    # 5. merge the last split
    if end_tile > first_tile:
        visible = tl.full((ROWS,), True, tl.int1)
        if MASK:
            visible = sees_split((end_tile - 1) // TILES, position, window, WINDOW)
        largest, mass, total = merge(largest, mass, total, visible, m, row_mass(w), o)
    return largest, mass, total


@triton.jit(do_not_specialize=["widest", "window"])
def attend_blocks(
    operands,
    k_tiles,
    v_tiles,
    blocks,
    rows,
    tables,
    widest,
    window,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    CAP: tl.constexpr,
):
    """Grid: blocks [T, 2] x parts of a block x key heads. A row is a token and a query head.

    Row r of a block is its token r // GROUP and query head r % GROUP of the key head's group.
    k_tiles and v_tiles are as `PrefillForm` says. CAP: of scores, or None.
    """
    # 1. this program's key head and rows of a block
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    LANES: tl.constexpr = SHAPE.LANES
    ROWS: tl.constexpr = FORM.ROWS
    PARTS: tl.constexpr = FORM.BLOCK * GROUP // ROWS
    head = tl.program_id(0) % SHAPE.KEY_HEADS
    work = tl.program_id(0) // SHAPE.KEY_HEADS
    part = PARTS - 1 - work % PARTS
    sequence = tl.load(blocks + work // PARTS * 2)
    first = tl.load(blocks + work // PARTS * 2 + 1)
    first_row = tl.load(rows + sequence * 3)
    count = tl.load(rows + sequence * 3 + 1)
    start = tl.load(rows + sequence * 3 + 2)
    row = part * ROWS + tl.arange(0, ROWS)
    token = first + row // GROUP
    low = first + part * ROWS // GROUP
    if low < count:
        high = tl.minimum(first + (part * ROWS + ROWS - 1) // GROUP, count - 1)
        # 2. load q
        lane = tl.arange(0, LANES)
        live = token < count
        to = (first_row + token).to(tl.int64)
        column = (head * GROUP + row % GROUP) * HEAD
        mask = live[:, None] & (lane < HEAD)[None, :]
        q_at = operands.q + to[:, None] * operands.q_stride + column[:, None] + lane[None, :]
        query = tl.load(q_at, mask=mask, other=0.0)
        # 3. tiles before `whole_end` lie in whole splits that every row sees; the others are masked
        position = start + token
        length = start + count
        end_tile = (start + high) // TILE + 1
        if SHAPE.WINDOW:
            whole_end = tl.maximum(start + low - window + 1, 0) // TILE
        else:
            whole_end = (start + low + 1) // PAGE * TILES
        table = tables + sequence * widest
        query_head = head * GROUP + row % GROUP
        state = row_state(operands.sinks, query_head, ROWS, LANES, SHAPE.SINKS)
        # 4. walk the tiles
        if not SHAPE.WINDOW:
            state = _walk_tiles(
                operands,
                k_tiles,
                v_tiles,
                query,
                table,
                head,
                0,
                whole_end,
                position,
                length,
                window,
                state,
                SHAPE,
                FORM,
                False,
                CAP,
            )
        _, mass, total = _walk_tiles(
            operands,
            k_tiles,
            v_tiles,
            query,
            table,
            head,
            whole_end,
            end_tile,
            position,
            length,
            window,
            state,
            SHAPE,
            FORM,
            True,
            CAP,
        )
        # 5. store the results
        result = row_result(mass, total, live)
        out = operands.out
        row_at = to[:, None] * (SHAPE.KEY_HEADS * GROUP * HEAD)
        out_at = out + row_at + column[:, None] + lane[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
