"""The gated delta rule's pass over chunks: one program a sequence, value head and COLUMNS columns.

All of a sequence's rows of this step, chunk by chunk, blocks of 16 in turn; a decode row is a chunk
with one new row. `kernels/cpu/linear/delta_rule.py` has the expressions. States that move end in
`boundary`; of a run with drafts they stay in registers. A piece says where the state at its chunk's
start is kept as a snapshot, if it is.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, await_first
from tpdet.kernels.cuda.linear.gates import decay_of
from tpdet.kernels.cuda.linear.products import (
    add_exact,
    add_terms,
    below,
    high_and_low,
    sum_of_exact,
    sum_of_split,
)
from tpdet.kernels.cuda.linear.tables import (
    CHUNK,
    INVERSE,
    KEPT,
    KEYS,
    PIECE_FIELDS,
    QUERIES,
    TILES,
    VECTORS,
    sequence_at,
    sequence_of,
)

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)
ALL_CHUNKS, FIRST_CHUNK, LAST_CHUNK = (tl.constexpr(part) for part in range(3))
"""What a launch takes of a run: all chunks, or those at its ends, where `whole_chunks.py` has the
others: the first if it is not whole, the last. Of drafts the last launch takes all."""


@triton.jit
def exact_rows(rows, TWO: tl.constexpr):
    """Keys or queries as the matrix unit takes them."""
    return rows if TWO else rows.to(tl.float32)


@triton.jit
def move_on(total, keys, w, left, totals, TWO: tl.constexpr):
    """The chains of sum_j k_j (d_Cj * w_j)' go on by a block's rows."""
    high, low = high_and_low(left[:, None] * w, TWO)
    return add_exact(tl.trans(keys), high, low, totals, TWO)


@triton.jit
def state_pointers(state, slot, head, part, SHAPE: tl.constexpr):
    """Pointers to COLUMNS columns of a head's state [Dk, COLUMNS], and which of them are there."""
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    lane = tl.arange(0, SHAPE.KEY_LANES)[:, None]
    column = part * SHAPE.COLUMNS + tl.arange(0, SHAPE.COLUMNS)[None, :]
    inside = (lane < SHAPE.KEY_SIZE) & (column < SHAPE.VALUE_SIZE)
    base = (slot * HEADS + head) * SHAPE.KEY_SIZE
    return state.boundary + (base + lane) * SHAPE.VALUE_SIZE + column, inside


@triton.jit
def tile_of(
    scratch,
    of_head,
    KIND: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    AT: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """A tile [16, 16] of scratch in its terms; of fp32 twice."""
    small = tl.arange(0, BLOCK)
    TERMS: tl.constexpr = 2 if SHAPE.TWO else 1
    offset: tl.constexpr = BLOCK_ROW if KIND == INVERSE else BLOCK_ROW * (BLOCK_ROW + 1) // 2 + AT
    tile = scratch.tiles + (of_head * TERMS * TILES + KIND + offset) * (BLOCK * BLOCK)
    tile += small[:, None] * BLOCK + small[None, :]
    return tl.load(tile), tl.load(tile + (TERMS - 1) * TILES * BLOCK * BLOCK)


@triton.jit
def keep_rows(state, scratch, piece, spans, SHAPE: tl.constexpr):
    """A chunk's new keys, decays and inverses go to the rings: by the programs of first columns."""
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    ring, low, high = spans
    head = tl.program_id(0)
    key_head = head // SHAPE.GROUP
    row = tl.arange(0, CHUNK)
    new = (row >= low) & (row < high)
    ring = ring + row
    lane, column = tl.arange(0, SHAPE.KEY_LANES)[None, :], tl.arange(0, BLOCK)[None, :]
    mask = new[:, None] & (lane < KEY_SIZE)
    source = scratch.keys + ((piece * SHAPE.KEY_HEADS + key_head) * CHUNK + row[:, None]) * KEY_SIZE
    target = state.keys + (ring[:, None] * SHAPE.KEY_HEADS + key_head) * KEY_SIZE
    if head % SHAPE.GROUP == 0:
        tl.store(target + lane, tl.load(source + lane, mask=mask, other=0.0), mask=mask)
    of_head = (piece * HEADS + head) * CHUNK + row
    decay = tl.load(scratch.decays + of_head)
    tl.store(state.decays + ring * HEADS + head, decay, mask=new)
    source = scratch.inverses + of_head[:, None] * BLOCK
    target = state.inverses + (ring[:, None] * HEADS + head) * BLOCK
    tl.store(target + column, tl.load(source + column), mask=new[:, None])


@triton.jit
def pass_chunks(
    step,
    state,
    scratch,
    tables,
    out,
    SHAPE: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: value heads x parts of the columns x sequences (`sequence_at`); out [M, Hv, Dv].

    PART: which chunks of a run (`ALL_CHUNKS`, ..).
    """
    await_earlier(DEPENDENT)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TWO: tl.constexpr = SHAPE.TWO
    COLUMNS: tl.constexpr = SHAPE.COLUMNS
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    head, part = tl.program_id(0), tl.program_id(1)
    key_head = head // SHAPE.GROUP
    index = sequence_at(tables, tl.program_id(2), SHAPE.ALONE)
    first_row, start, end, slot = sequence_of(tables, index)
    of_state = tables.states + index * 4
    drafts, piece = tl.load(of_state + 2), tl.load(of_state + 3).to(tl.int64)
    ALONE: tl.constexpr = 1 if SHAPE.ALONE else 0
    if end - start <= ALONE:
        return
    first_chunk, last_chunk = start // CHUNK, (end - 1) // CHUNK
    begin, stop = first_chunk, last_chunk
    if PART == FIRST_CHUNK:
        if (drafts != 0) | (start % CHUNK == 0) | (first_chunk == last_chunk):
            return
        stop = first_chunk
    if PART == LAST_CHUNK:
        begin = tl.where(drafts == 0, last_chunk, first_chunk)
    small, lane = tl.arange(0, BLOCK), tl.arange(0, SHAPE.KEY_LANES)[None, :]
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = column < SHAPE.VALUE_SIZE
    boundary, inside = state_pointers(state, slot, head, part, SHAPE)
    total = tl.load(boundary, mask=inside, other=0.0)
    none = tl.zeros((BLOCK, COLUMNS), tl.float32)
    KEY_LANES: tl.constexpr = SHAPE.KEY_LANES
    nothing = tl.zeros((KEY_LANES, COLUMNS), tl.float32)
    for chunk in range(begin, stop + 1):
        low, high = tl.maximum(start - chunk * CHUNK, 0), tl.minimum(end - chunk * CHUNK, CHUNK)
        number = (first_row + chunk * CHUNK - start).to(tl.int64)
        ring = slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING
        chunk_piece = piece + chunk - first_chunk
        of_head = chunk_piece * HEADS + head
        if PART != FIRST_CHUNK:  # of which no snapshot is: it is not whole
            snapshot = tl.load(tables.pieces + chunk_piece * PIECE_FIELDS + KEPT).to(tl.int64)
            if snapshot >= 0:
                kept, _ = state_pointers(state, snapshot, head, part, SHAPE)
                tl.store(kept, total, mask=inside)
        vector = scratch.vectors + of_head * (VECTORS * CHUNK)
        state_high, state_low = high_and_low(total, TWO)
        moved = (nothing, nothing)
        first = high_and_low(none, TWO)
        second, third = first, first
        for block in tl.static_range(BLOCKS):
            if block * BLOCK < high:
                # 1. the block's rows
                row = block * BLOCK + small
                new, old = (row >= low) & (row < high), row < low
                rows = number + row
                source = (chunk_piece * SHAPE.KEY_HEADS + key_head) * CHUNK + row[:, None]
                mask = lane < KEY_SIZE
                k = tl.load(scratch.keys + source * KEY_SIZE + lane, mask=mask, other=0.0)
                q_row = step.q + rows[:, None] * step.q_stride + key_head * KEY_SIZE + lane
                q = tl.load(q_row, mask=mask & new[:, None], other=0.0)
                k, q = exact_rows(k, TWO), exact_rows(q, TWO)
                begun = tl.load(vector + row)[:, None]
                # 2. what the state and earlier blocks give
                of_keys, of_queries = (none, none, none), (none, none, none)
                for j in tl.static_range(block):
                    w = first if j == 0 else second if j == 1 else third
                    p = tile_of(scratch, of_head, KEYS, block, j, SHAPE)
                    of_keys = add_terms(p, w, of_keys, TWO)
                    p = tile_of(scratch, of_head, QUERIES, block, j, SHAPE)
                    of_queries = add_terms(p, w, of_queries, TWO)
                by_keys = sum_of_exact(add_exact(k, state_high, state_low, (none, none), TWO), TWO)
                by_keys = begun * by_keys + sum_of_split(of_keys, TWO)
                seen = sum_of_exact(add_exact(q, state_high, state_low, (none, none), TWO), TWO)
                seen = begun * seen + sum_of_split(of_queries, TWO)
                # 3. right-hand sides: new ones made, older ones read
                value = step.v + rows[:, None] * step.v_stride + head * SHAPE.VALUE_SIZE + column
                value = tl.load(value, mask=there & new[:, None], other=0.0).to(tl.float32)
                strength = tl.load(vector + 2 * CHUNK + row)[:, None]
                rest = strength * (value - tl.load(vector + 3 * CHUNK + row)[:, None] * by_keys)
                stored = ((ring + row[:, None]) * HEADS + head) * SHAPE.VALUE_SIZE + column
                older = tl.load(state.updates + stored, mask=there & old[:, None], other=0.0)
                rest = tl.where(new[:, None], rest, older)
                if (drafts != 0) | (chunk == last_chunk):
                    tl.store(state.updates + stored, rest, mask=there & new[:, None])
                # 4. solved, and seen by the queries
                w = below(tile_of(scratch, of_head, INVERSE, block, block, SHAPE), rest, TWO)
                own = tile_of(scratch, of_head, QUERIES, block, block, SHAPE)
                seen = seen + below(own, w, TWO)
                target = (rows[:, None] * HEADS + head) * SHAPE.VALUE_SIZE + column
                result = tl.load(vector + 4 * CHUNK + row)[:, None] * seen
                tl.store(out + target, result.to(out.dtype.element_ty), mask=there & new[:, None])
                if block == 0:
                    first = high_and_low(w, TWO)
                elif block == 1:
                    second = high_and_low(w, TWO)
                elif block == 2:
                    third = high_and_low(w, TWO)
                if chunk < last_chunk:
                    left = tl.load(vector + CHUNK + row)
                    moved = move_on(total, k, w, left, moved, TWO)
        if ((drafts != 0) | (chunk == last_chunk)) & (part == 0):
            keep_rows(state, scratch, chunk_piece, (ring, low, high), SHAPE)
        if chunk < last_chunk:
            total = tl.load(vector + (CHUNK - 1)) * total + sum_of_exact(moved, TWO)
    if (begin < last_chunk) & (drafts == 0):
        tl.store(boundary, total, mask=inside)


@triton.jit
def advanced(state, source, chunk, total, SHAPE: tl.constexpr):
    """A state behind a chunk's stored rows: total is a program's columns of that at its start."""
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TWO: tl.constexpr = SHAPE.TWO
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    head, part = tl.program_id(0), tl.program_id(1)
    ring = source * SHAPE.RING + chunk * CHUNK % SHAPE.RING
    row, small = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    lane = tl.arange(0, SHAPE.KEY_LANES)[None, :]
    column = part * SHAPE.COLUMNS + tl.arange(0, SHAPE.COLUMNS)[None, :]
    nothing = tl.zeros(total.shape, tl.float32)
    whole = tl.sum(tl.load(state.decays + (ring + row) * HEADS + head), axis=0)
    moved, known = (nothing, nothing), whole * 0
    for block in tl.static_range(BLOCKS):
        rows = ring + block * BLOCK + small
        logs = tl.load(state.decays + rows * HEADS + head)
        left = decay_of(whole - (known + tl.cumsum(logs, axis=0)))
        known += tl.sum(logs, axis=0)
        k = state.keys + (rows[:, None] * SHAPE.KEY_HEADS + head // SHAPE.GROUP) * KEY_SIZE + lane
        k = exact_rows(tl.load(k, mask=lane < KEY_SIZE, other=0.0), TWO)
        of_head = rows[:, None] * HEADS + head
        rest = state.updates + of_head * SHAPE.VALUE_SIZE + column
        rest = tl.load(rest, mask=column < SHAPE.VALUE_SIZE, other=0.0)
        inverse = tl.load(state.inverses + of_head * BLOCK + small[None, :])
        w = below(high_and_low(inverse, TWO), rest, TWO)
        moved = move_on(total, k, w, left, moved, TWO)
    return decay_of(whole) * total + sum_of_exact(moved, TWO)


@triton.jit
def advance(state, source, target, chunk, SHAPE: tl.constexpr):
    """boundary[target] becomes source's, moved on by the chunk's rows: a program's columns."""
    head, part = tl.program_id(0), tl.program_id(1)
    boundary, inside = state_pointers(state, source, head, part, SHAPE)
    total = advanced(state, source, chunk, tl.load(boundary, mask=inside, other=0.0), SHAPE)
    boundary, inside = state_pointers(state, target, head, part, SHAPE)
    tl.store(boundary, total, mask=inside)


@triton.jit
def advance_chunks(state, moves, SHAPE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid: value heads x parts of the columns x moves [N, 3] int32 (source, target, chunk)."""
    await_earlier(DEPENDENT)
    fields = moves + tl.program_id(2) * 3
    source, target = tl.load(fields).to(tl.int64), tl.load(fields + 1).to(tl.int64)
    advance(state, source, target, tl.load(fields + 2), SHAPE)


@triton.jit(do_not_specialize=["count"])
def advance_late(
    state, tables, count, SHAPE: tl.constexpr, SEQUENCES: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The states of sequences whose first row begins a chunk for which they do not stand yet.

    Grid: value heads x parts of the columns x turns; the turns deal out the `count` sequences'
    states that are late, which are few: one row of 64 begins a chunk.
    """
    await_earlier(DEPENDENT)
    for first in range(0, count, SEQUENCES):
        index = first + tl.arange(0, SEQUENCES)
        live = index < count
        start = tl.load(tables.rows + index * 3 + 2, mask=live, other=0)
        standing = tl.load(tables.states + index * 4 + 1, mask=live, other=0)
        live &= tl.load(tables.rows + index * 3 + 1, mask=live, other=0) > 0
        late = (live & (standing < start // CHUNK)).to(tl.int32)
        for number in range(tl.program_id(2), tl.sum(late, axis=0), tl.num_programs(2)):
            order = tl.cumsum(late, axis=0)
            one = tl.sum(tl.where((late > 0) & (order == number + 1), index, 0), axis=0)
            slot = tl.load(tables.states + one * 4).to(tl.int64)
            advance(state, slot, slot, tl.load(tables.states + one * 4 + 1), SHAPE)
    await_first(DEPENDENT)
