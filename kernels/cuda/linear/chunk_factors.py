"""What rows of a chunk have to do with each other: products, decays, inverses; all chunks at once.

One program takes a piece (a chunk of one sequence) and a value head. It reads the chunk's older
rows from the rings and this step's from the step, and writes to scratch (`ChunkScratch`):

    p_ij = d_ij * (k_i . k_j),  p'_ij = d_ij * (q_i . k_j)      i >= j
    T_i  = 1_i + sum_{j < i of the block} -((c_i * n_i) * p_ij) * T_j          ascending j, no fma
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.linear.gates import decay_of
from tpdet.kernels.cuda.linear.tables import CHUNK, rows_of_piece

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def keys_and_queries(step, state, scratch, tables, SHAPE: tl.constexpr):
    """A chunk's keys and this step's queries [64, Dk], zeros in other rows; stores the keys."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    KEY_HEADS: tl.constexpr = SHAPE.KEY_HEADS
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    key_head = head // SHAPE.GROUP
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
    if head % SHAPE.GROUP == 0:
        tl.store(target + lane[None, :], k, mask=tl.broadcast_to(inside, k.shape))
    return q, k


@triton.jit
def invert_blocks(factors, state, scratch, tables, SHAPE: tl.constexpr):
    """T of a chunk's four blocks, from the products in scratch; older rows from the ring."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    block, row = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = block * BLOCK + row  # [4, 16]: rows of the chunk
    new, old = (inside >= low) & (inside < high), inside < low
    number = (first_row + inside).to(tl.int64)
    strength = tl.load(factors.strength + number * HEADS + head, mask=new, other=0.0)
    key_factor = factors.key + number * SHAPE.KEY_HEADS + head // SHAPE.GROUP
    strength = strength * tl.load(key_factor, mask=new, other=0.0)
    column = tl.arange(0, BLOCK)[None, None, :]
    product = scratch.products + (piece * HEADS + head) * (2 * CHUNK * CHUNK)
    product += inside[:, :, None] * CHUNK + block[:, :, None] * BLOCK
    coupling = -(strength[:, :, None] * tl.load(product + column))  # [4, 16, 16]
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
    target = scratch.inverses + ((piece * HEADS + head) * CHUNK + inside[:, :, None]) * BLOCK
    tl.store(target + column, inverse)


@triton.jit
def chunk_factors(
    step,
    factors,
    state,
    scratch,
    tables,
    SHAPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: pieces x value heads."""
    await_earlier(DEPENDENT)
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    row = tl.arange(0, CHUNK)
    new, old = (row >= low) & (row < high), row < low
    # 1. products of keys and queries with keys
    q, k = keys_and_queries(step, state, scratch, tables, SHAPE)
    none = tl.zeros((CHUNK, CHUNK), tl.float32)
    if SHAPE.TWO:
        kk, qk = tl.dot(k, tl.trans(k), none), tl.dot(q, tl.trans(k), none)
    else:
        q, k = q.to(tl.float32), k.to(tl.float32)
        kk = tl.dot(k, tl.trans(k), none, input_precision="ieee")
        qk = tl.dot(q, tl.trans(k), none, input_precision="ieee")
    # 2. decays, by differences of prefix sums
    number = (first_row + row).to(tl.int64)
    ring = slot * SHAPE.RING + chunk * CHUNK % SHAPE.RING + row
    logs = tl.load(factors.decay + number * HEADS + head, mask=new, other=0)
    logs = tl.where(new, logs, tl.load(state.decays + ring * HEADS + head, mask=old, other=0))
    sums = tl.cumsum(logs, axis=0)
    visible = row[:, None] >= row[None, :]
    decay = decay_of(tl.where(visible, sums[:, None] - sums[None, :], 0))
    target = (piece * HEADS + head) * CHUNK + row
    tl.store(scratch.begun + target, decay_of(sums))
    tl.store(scratch.left + target, decay_of(tl.sum(logs, axis=0) - sums))
    # 3. stored, and the inverses of what is stored
    base = scratch.products + (piece * HEADS + head) * (2 * CHUNK * CHUNK)
    base += row[:, None] * CHUNK + row[None, :]
    tl.store(base, tl.where(visible, decay * kk, 0.0))
    tl.store(base + CHUNK * CHUNK, tl.where(visible, decay * qk, 0.0))
    tl.debug_barrier()
    invert_blocks(factors, state, scratch, tables, SHAPE)
