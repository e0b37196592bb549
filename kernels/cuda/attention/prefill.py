"""Attention of sequences with many rows in a step: one program walks all keys of its rows.

M, P, B  rows of the step, pages, sequences; a token has one row
Hq, Hkv  query and key heads; GROUP = Hq / Hkv query heads share a key head
D        lanes of a head (HEAD), LANES with the pad to a power of two
R        rows of a program (ROWS): a token and a query head of the group each
q, out [M, Hq, D], k_pages, v_pages [P, Hkv, 256, D]: bf16, fp16 or fp32; sums are fp32
rows [B, 3] (first row, tokens, first position), tables [B, widest] (pages): int32
blocks [T, 2] (sequence, first token): int32
sinks [Hq] fp32, read if SINKS
"""

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


@triton.jit
def _walk_tiles(
    q,
    k_pages,
    v_pages,
    k_tiles,
    v_tiles,
    table,
    head,
    first_tile,
    end_tile,
    position,
    length,
    window,
    scale,
    largest,
    mass,
    total,
    ROWS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
    CAP: tl.constexpr,
):
    """Tiles [first_tile, end_tile) onto the row state; a split merges before the next begins.

    Not MASK: every row sees every key of these tiles, and they are whole splits. The merge stands
    at the start of the loop: at its end ptxas serialises the wgmma instructions (C7515).
    """
    lane = tl.arange(0, LANES)
    inside = tl.arange(0, TILE)
    m, w, o = fresh_state(ROWS, LANES)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        # 1. where the tile lies
        split = tile // TILES
        number = tl.load(table + split)
        page = (number.to(tl.int64) * KEY_HEADS + head) * (PAGE * HEAD)
        offset = (tile - split * TILES) * TILE + inside
        key = tile * TILE + inside
        k_at = k_pages + page + offset[None, :] * HEAD + lane[:, None]
        v_at = v_pages + page + offset[:, None] * HEAD + lane[None, :]
        # 2. load K and V
        if MASK:
            stored = key < length
            k = tl.load(k_at, mask=stored[None, :] & (lane < HEAD)[:, None], other=0.0)
            v = tl.load(v_at, mask=stored[:, None] & (lane < HEAD)[None, :], other=0.0)
            seen = sees(key[None, :], position[:, None], window, WINDOW)
        else:
            if DESCRIPTORS:
                at = (number * KEY_HEADS + head) * PAGE + (tile - split * TILES) * TILE
                k = k_tiles.load([at, 0]).T
                v = v_tiles.load([at, 0])
            elif LANES == HEAD:
                k = tl.load(k_at)
                v = tl.load(v_at)
            else:
                k = tl.load(k_at, mask=(lane < HEAD)[:, None], other=0.0)
                v = tl.load(v_at, mask=(lane < HEAD)[None, :], other=0.0)
            seen = False
        # 3. a finished split merges before the next begins
        if (tile > first_tile) & (tile - split * TILES == 0):
            visible = tl.full((ROWS,), True, tl.int1)
            if MASK:
                visible = sees_split(split - 1, position, window, WINDOW)
            largest, mass, total = merge(largest, mass, total, visible, m, row_mass(w), o)
            m, w, o = fresh_state(ROWS, LANES)
        # 4. add the tile to the split's state
        m, w, o = add_tile(q, k, v, seen, m, w, o, scale, MASK, CAP)
    # 5. merge the last split
    if end_tile > first_tile:
        visible = tl.full((ROWS,), True, tl.int1)
        if MASK:
            visible = sees_split((end_tile - 1) // TILES, position, window, WINDOW)
        largest, mass, total = merge(largest, mass, total, visible, m, row_mass(w), o)
    return largest, mass, total


@triton.jit(do_not_specialize=["widest", "window"])
def attend_blocks(
    q,
    k_pages,
    v_pages,
    k_tiles,
    v_tiles,
    out,
    blocks,
    rows,
    tables,
    sinks,
    q_stride,
    widest,
    window,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    CAP: tl.constexpr,
):
    """Grid: blocks [T, 2] x parts of a block x key heads. A row is a token and a query head.

    q [M, Hq, D] with row stride q_stride, pages [P, Hkv, 256, D], out [M, Hq, D]. Row r of a block
    is its token r // GROUP and query head r % GROUP of the key head's group. DESCRIPTORS: k_tiles
    and v_tiles are the pages as [P * Hkv * 256, D] in blocks of [64, LANES]; else not read. CAP: of
    scores, or None.
    """
    # 1. this program's key head and rows of a block
    PARTS: tl.constexpr = BLOCK * GROUP // ROWS
    head = tl.program_id(0) % KEY_HEADS
    work = tl.program_id(0) // KEY_HEADS
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
        q_at = q + to[:, None] * q_stride + column[:, None] + lane[None, :]
        query = tl.load(q_at, mask=mask, other=0.0)
        # 3. tiles before `whole_end` lie in whole splits that every row sees; the others are masked
        position = start + token
        length = start + count
        end_tile = (start + high) // TILE + 1
        if WINDOW:
            whole_end = tl.maximum(start + low - window + 1, 0) // TILE
        else:
            whole_end = (start + low + 1) // PAGE * TILES
        table = tables + sequence * widest
        query_head = head * GROUP + row % GROUP
        largest, mass, total = row_state(sinks, query_head, ROWS, LANES, SINKS)
        # 4. walk the tiles
        if not WINDOW:
            largest, mass, total = _walk_tiles(
                query,
                k_pages,
                v_pages,
                k_tiles,
                v_tiles,
                table,
                head,
                0,
                whole_end,
                position,
                length,
                window,
                scale,
                largest,
                mass,
                total,
                ROWS,
                KEY_HEADS,
                HEAD,
                LANES,
                WINDOW,
                DESCRIPTORS,
                False,
                STAGES,
                CAP,
            )
        largest, mass, total = _walk_tiles(
            query,
            k_pages,
            v_pages,
            k_tiles,
            v_tiles,
            table,
            head,
            whole_end,
            end_tile,
            position,
            length,
            window,
            scale,
            largest,
            mass,
            total,
            ROWS,
            KEY_HEADS,
            HEAD,
            LANES,
            WINDOW,
            DESCRIPTORS,
            True,
            STAGES,
            CAP,
        )
        # 5. store the results
        result = row_result(mass, total, live)
        out_at = out + to[:, None] * (KEY_HEADS * GROUP * HEAD) + column[:, None] + lane[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
