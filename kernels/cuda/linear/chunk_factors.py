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
from tpdet.kernels.cuda.linear.gates import DECAY_UNIT, decay_of, decay_of_log
from tpdet.kernels.cuda.linear.tables import (
    CHUNK,
    INVERSE,
    KEYS,
    PIECE_FIELDS,
    QUERIES,
    SPARE,
    TILES,
    VECTORS,
    rows_of_piece,
    sequence_of,
)

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def keys_of(block, step, state, spans, SHAPE: tl.constexpr):
    """A block's keys [16, Dk] of the program's key head, new and older; zeros in other rows."""
    ROW: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.KEY_SIZE
    first_row, ring, low, high = spans
    small, lane = tl.arange(0, BLOCK)[:, None], tl.arange(0, SHAPE.KEY_LANES)[None, :]
    first = block * BLOCK
    column = tl.program_id(0) // SHAPE.GROUP * SHAPE.KEY_SIZE
    older = state.keys + ((ring + first) * ROW + column)
    source = step.k + ((first_row + first).to(tl.int64) * step.k_stride + column)
    source = tl.where(small < low - first, older + small * ROW, source + small * step.k_stride)
    mask = (small < high - first) & (lane < SHAPE.KEY_SIZE)
    return tl.load(source + lane, mask=mask, other=0.0)


@triton.jit
def queries_of(block, step, spans, SHAPE: tl.constexpr):
    """A block's queries [16, Dk] of the program's key head, zeros in rows that are not new."""
    first_row, _, low, high = spans
    small, lane = tl.arange(0, BLOCK)[:, None], tl.arange(0, SHAPE.KEY_LANES)[None, :]
    first = block * BLOCK
    column = tl.program_id(0) // SHAPE.GROUP * SHAPE.KEY_SIZE
    source = step.q + ((first_row + first).to(tl.int64) * step.q_stride + column)
    mask = (small >= low - first) & (small < high - first) & (lane < SHAPE.KEY_SIZE)
    return tl.load(source + (small * step.q_stride + lane), mask=mask, other=0.0)


@triton.jit
def exact_product(left, right, TWO: tl.constexpr):
    """left @ right' of rows in a model's dtype, a chain from +0."""
    none = tl.zeros((left.shape[0], right.shape[0]), tl.float32)
    if TWO:
        return tl.dot(left, tl.trans(right), none)
    left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, tl.trans(right), none, input_precision="ieee")


@triton.jit
def store_terms(target, x, mask, TWO: tl.constexpr):
    """The terms of x go to the tiles of target, those of a term behind those of the one before."""
    if TWO:
        high = x.to(tl.bfloat16)
        tl.store(target, high, mask=mask)
        tl.store(target + TILES * BLOCK * BLOCK, (x - high.to(tl.float32)).to(tl.bfloat16), mask)
    else:
        tl.store(target, x, mask=mask)


@triton.jit
def row_vectors(spans, factors, state, scratch, SHAPE: tl.constexpr):
    """Stores the vectors of a chunk's rows, and their prefix sums of log decays in fp64.

    Sums of l are integers from -2^53 on, which fp64 has exactly, as it has their differences.
    """
    head, piece = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    first_row, ring, low, high = spans
    row = tl.arange(0, CHUNK)
    new, old = (row >= low) & (row < high), row < low
    number = (first_row + row).to(tl.int64)
    ring += row
    of_head = piece * HEADS + head
    logs = tl.load(factors.decay + number * HEADS + head, mask=new, other=0)
    logs = tl.where(new, logs, tl.load(state.decays + ring * HEADS + head, mask=old, other=0))
    tl.store(scratch.decays + of_head * CHUNK + row, logs)
    sums = tl.cumsum(logs, axis=0)
    strength = tl.load(factors.strength + number * HEADS + head, mask=new, other=0.0)
    of_key = number * SHAPE.KEY_HEADS + head // SHAPE.GROUP
    of_query = tl.load(factors.query + of_key, mask=new, other=0.0)
    of_key = tl.load(factors.key + of_key, mask=new, other=0.0)
    vector = scratch.vectors + of_head * (VECTORS * CHUNK) + row
    tl.store(vector, decay_of(sums))
    tl.store(vector + CHUNK, decay_of(tl.sum(logs, axis=0) - sums))
    tl.store(vector + 2 * CHUNK, strength)
    tl.store(vector + 3 * CHUNK, of_key)
    tl.store(vector + 4 * CHUNK, of_query)
    spare = scratch.vectors + (of_head * VECTORS + SPARE) * CHUNK
    tl.store(spare.to(tl.pointer_type(tl.float64)) + row, sums.to(tl.float64) * DECAY_UNIT)


@triton.jit
def invert_blocks(of_head, spans, state, scratch, SHAPE: tl.constexpr):
    """T of a chunk's four blocks, from couplings in the scratch of T; older rows from the ring.

    A thread has a column of a block, whose rows it goes down.
    """
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TERMS: tl.constexpr = 2 if SHAPE.TWO else 1
    _, ring, low, high = spans
    first, column = tl.arange(0, BLOCKS)[:, None] * BLOCK, tl.arange(0, BLOCK)[None, :]
    target = scratch.inverses + (of_head * CHUNK + first) * BLOCK + column  # [4, 16]
    coupling = scratch.inverses + (of_head * CHUNK + first) * BLOCK + 0 * column
    stored = state.inverses + ((ring + first) * HEADS + tl.program_id(0)) * BLOCK + column
    tile = scratch.tiles + (of_head * TERMS * TILES + INVERSE) * (BLOCK * BLOCK)
    tile += first * BLOCK + column
    rows = ()
    for i in tl.static_range(BLOCK):
        sums = tl.zeros((BLOCKS, BLOCK), tl.float32)
        for j in tl.static_range(i):
            sums += tl.load(coupling + (i * BLOCK + j)) * rows[j]
        old = (first + i < low) & (column >= 0)
        inverse = tl.load(stored + i * (HEADS * BLOCK), mask=old, other=0.0)
        new = (first + i >= low) & (first + i < high)
        inverse = tl.where(new, tl.where(column == i, 1.0, sums), inverse)
        rows = rows + (inverse,)  # type: ignore[assignment] # noqa: RUF005
        store_terms(tile + i * BLOCK, inverse, None, SHAPE.TWO)
    tl.debug_barrier()
    for i in tl.static_range(BLOCK):
        tl.store(target + i * BLOCK, rows[i])


@triton.jit
def chunk_factors(
    step, factors, state, scratch, tables, SHAPE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid: value heads x pieces. Tiles of 16 x 16 in turn: those that no row reads are left out.

    What a warp does to one tile is short code: unrolled, it is fetched more slowly than it runs.
    """
    await_earlier(DEPENDENT)
    head, piece = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    TERMS: tl.constexpr = 2 if SHAPE.TWO else 1
    TILE: tl.constexpr = BLOCK * BLOCK
    ALONE: tl.constexpr = 1 if SHAPE.ALONE else 0
    sequence = tl.load(tables.pieces + piece * PIECE_FIELDS)
    first_row, start, end, slot = sequence_of(tables, sequence)
    if end - start <= ALONE:
        return
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    spans = first_row, slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING, low, high
    of_head = piece * HEADS + head
    # 1. vectors of rows
    row_vectors(spans, factors, state, scratch, SHAPE)
    tl.debug_barrier()
    vector = scratch.vectors + of_head * (VECTORS * CHUNK)
    sums = (vector + SPARE * CHUNK).to(tl.pointer_type(tl.float64))
    small, lane = tl.arange(0, BLOCK), tl.arange(0, SHAPE.KEY_LANES)[None, :]
    inside = small[:, None] * BLOCK + small[None, :]
    tiles = scratch.tiles + of_head * (TERMS * TILES * TILE)
    for block in range(tl.cdiv(high, BLOCK)):
        row = block * BLOCK + small
        q = queries_of(block, step, spans, SHAPE)
        k = keys_of(block, step, state, spans, SHAPE)
        if head % SHAPE.GROUP == 0:
            target = (piece * SHAPE.KEY_HEADS + head // SHAPE.GROUP) * CHUNK + block * BLOCK
            target = scratch.keys + target * SHAPE.KEY_SIZE
            target += small[:, None] * SHAPE.KEY_SIZE + lane
            tl.store(target, k, mask=tl.broadcast_to(lane < SHAPE.KEY_SIZE, k.shape))
        until = tl.load(sums + row)
        coupled = tl.load(vector + 2 * CHUNK + row) * tl.load(vector + 3 * CHUNK + row)
        for other in range(block + 1):
            # 2. products of keys and queries with keys, by decays
            keys = keys_of(other, step, state, spans, SHAPE)
            since = tl.load(sums + other * BLOCK + small)
            decay = decay_of_log(until[:, None] - since[None, :])
            visible = small[None, :] - small[:, None] <= (block - other) * BLOCK
            p = tl.where(visible, decay * exact_product(k, keys, SHAPE.TWO), 0.0)
            seen = tl.where(visible, decay * exact_product(q, keys, SHAPE.TWO), 0.0)
            tile = tiles + (block * (block + 1) // 2 + other) * TILE
            store_terms(tile + KEYS * TILE + inside, p, None, SHAPE.TWO)
            store_terms(tile + QUERIES * TILE + inside, seen, None, SHAPE.TWO)
            if other == block:
                target = scratch.inverses + (of_head * CHUNK + block * BLOCK) * BLOCK
                tl.store(target + inside, -(coupled[:, None] * p))
    # 3. the inverses of the blocks
    tl.debug_barrier()
    invert_blocks(of_head, spans, state, scratch, SHAPE)
