"""What rows of a chunk have to do with each other: products, decays, inverses; all chunks at once.

One program takes a piece (a chunk of one sequence) and a value head. It reads the chunk's older
rows from the rings and this step's from the step, and writes to scratch (`ChunkScratch`), products
in the terms that the pass multiplies:

    p_ij = d_ij * (k_i . k_j),  p'_ij = d_ij * (q_i . k_j)      i >= j
    T_i  = 1_i + sum_{j < i of the block} -((c_i * n_i) * p_ij) * T_j          ascending j, no fma
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.linear.gates import decay_of
from tpdet.kernels.cuda.linear.products import high_and_low
from tpdet.kernels.cuda.linear.tables import (
    CHUNK,
    INVERSE,
    KEYS,
    PIECE_FIELDS,
    QUERIES,
    TILES,
    VECTORS,
    rows_of_piece,
    sequence_of,
)

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def keys_and_queries(step, state, scratch, tables, SHAPE: tl.constexpr):
    """A chunk's keys and this step's queries [64, Dk], zeros in other rows; stores the keys."""
    piece, key_head = tl.program_id(1).to(tl.int64), tl.program_id(0) // SHAPE.GROUP
    KEY_HEADS: tl.constexpr = SHAPE.KEY_HEADS
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    row, lane = tl.arange(0, CHUNK), tl.arange(0, SHAPE.KEY_LANES)
    column = key_head * KEY_SIZE + lane[None, :]
    new, old = (row >= low) & (row < high), row < low
    inside = (lane < KEY_SIZE)[None, :]
    number = (first_row + row).to(tl.int64)
    ring = slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING + row
    fresh = new[:, None] & inside
    q = tl.load(step.q + number[:, None] * step.q_stride + column, mask=fresh, other=0.0)
    k = tl.load(step.k + number[:, None] * step.k_stride + column, mask=fresh, other=0.0)
    stored = state.keys + ring[:, None] * (KEY_HEADS * KEY_SIZE) + column
    older = tl.load(stored, mask=old[:, None] & inside, other=0.0)
    k = tl.where(new[:, None], k, older)
    target = scratch.keys + ((piece * KEY_HEADS + key_head) * CHUNK + row[:, None]) * KEY_SIZE
    if tl.program_id(0) % SHAPE.GROUP == 0:
        tl.store(target + lane[None, :], k, mask=tl.broadcast_to(inside, k.shape))
    return q, k


@triton.jit
def store_terms(target, x, mask, TWO: tl.constexpr):
    """The terms of x go to the tiles of target, those of a term behind those of the one before."""
    high, low = high_and_low(x, TWO)
    tl.store(target, high, mask=mask)
    if TWO:
        tl.store(target + TILES * BLOCK * BLOCK, low, mask=mask)


@triton.jit
def invert_blocks(of_head, head, state, scratch, tables, SHAPE: tl.constexpr):
    """T of a chunk's four blocks, from p in the scratch of T; older rows from the ring."""
    piece = tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TERMS: tl.constexpr = 2 if SHAPE.TWO else 1
    _, slot, chunk, low, high = rows_of_piece(tables, piece)
    block, row = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = block * BLOCK + row  # [4, 16]: rows of the chunk
    new, old = (inside >= low) & (inside < high), inside < low
    column = tl.arange(0, BLOCK)[None, None, :]
    target = scratch.inverses + (of_head * CHUNK + inside[:, :, None]) * BLOCK + column
    coupling = tl.load(target)  # [4, 16, 16]
    ring = slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING + inside
    stored = state.inverses + ((ring * HEADS + head) * BLOCK)[:, :, None] + column
    inverse = tl.load(stored, mask=old[:, :, None], other=0.0)
    sums = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32)
    for j in range(BLOCK):
        here = (row == j)[:, :, None]
        inverse = tl.where(here & new[:, :, None], tl.where(column == j, 1.0, sums), inverse)
        final = tl.sum(tl.where(here, inverse, 0.0), axis=1)[:, None, :]
        factor = tl.sum(tl.where(column == j, coupling, 0.0), axis=2)[:, :, None]
        sums = tl.where((row > j)[:, :, None], sums + factor * final, sums)
    tl.store(target, inverse)
    tile = scratch.tiles + (of_head * TERMS * TILES + INVERSE) * (BLOCK * BLOCK)
    store_terms(tile + inside[:, :, None] * BLOCK + column, inverse, None, SHAPE.TWO)


@triton.jit
def chunk_factors(
    step, factors, state, scratch, tables, SHAPE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid: value heads x pieces."""
    await_earlier(DEPENDENT)
    head, piece = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // SHAPE.GROUP
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TERMS: tl.constexpr = 2 if SHAPE.TWO else 1
    ALONE: tl.constexpr = 1 if SHAPE.ALONE else 0
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    _, start, end, _ = sequence_of(tables, tl.load(tables.pieces + piece * PIECE_FIELDS))
    if end - start <= ALONE:
        return
    row = tl.arange(0, CHUNK)
    new, old = (row >= low) & (row < high), row < low
    number = (first_row + row).to(tl.int64)
    ring = slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING + row
    of_head = piece * HEADS + head
    # 1. products of keys and queries with keys
    q, k = keys_and_queries(step, state, scratch, tables, SHAPE)
    none = tl.zeros((CHUNK, CHUNK), tl.float32)
    if SHAPE.TWO:
        kk, qk = tl.dot(k, tl.trans(k), none), tl.dot(q, tl.trans(k), none)
    else:
        q, k = q.to(tl.float32), k.to(tl.float32)
        kk = tl.dot(k, tl.trans(k), none, input_precision="ieee")
        qk = tl.dot(q, tl.trans(k), none, input_precision="ieee")
    # 2. vectors; decays are differences of prefix sums
    logs = tl.load(factors.decay + number * HEADS + head, mask=new, other=0)
    logs = tl.where(new, logs, tl.load(state.decays + ring * HEADS + head, mask=old, other=0))
    tl.store(scratch.decays + of_head * CHUNK + row, logs)
    sums = tl.cumsum(logs, axis=0)
    strength = tl.load(factors.strength + number * HEADS + head, mask=new, other=0.0)
    of_key = number * SHAPE.KEY_HEADS + key_head
    of_query = tl.load(factors.query + of_key, mask=new, other=0.0)
    of_key = tl.load(factors.key + of_key, mask=new, other=0.0)
    vector = scratch.vectors + of_head * (VECTORS * CHUNK) + row
    tl.store(vector, decay_of(sums))
    tl.store(vector + CHUNK, decay_of(tl.sum(logs, axis=0) - sums))
    tl.store(vector + 2 * CHUNK, strength)
    tl.store(vector + 3 * CHUNK, of_key)
    tl.store(vector + 4 * CHUNK, of_query)
    # 3. products by decays, stored in terms
    i, j = row[:, None], row[None, :]
    visible = i >= j
    block = i // BLOCK
    tile = (block * (block + 1) // 2 + j // BLOCK) * (BLOCK * BLOCK) + i % BLOCK * BLOCK + j % BLOCK
    base = scratch.tiles + of_head * (TERMS * TILES * BLOCK * BLOCK) + tile
    stored = j // BLOCK <= block
    decay = decay_of(tl.where(visible, sums[:, None] - sums[None, :], 0))
    p = tl.where(visible, decay * kk, 0.0)
    store_terms(base + KEYS * BLOCK * BLOCK, p, stored, SHAPE.TWO)
    of_queries = tl.where(visible, decay * qk, 0.0)
    store_terms(base + QUERIES * BLOCK * BLOCK, of_queries, stored, SHAPE.TWO)
    # 4. the inverses of the blocks
    coupling = -((strength * of_key)[:, None] * p)
    target = scratch.inverses + (of_head * CHUNK + i) * BLOCK + j % BLOCK
    tl.store(target, coupling, mask=block == j // BLOCK)
    tl.debug_barrier()
    invert_blocks(of_head, head, state, scratch, tables, SHAPE)
