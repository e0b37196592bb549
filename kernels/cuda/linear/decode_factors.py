"""What a sequence's one new row has to do with the older rows of its chunk, for a decode step.

One program of one warp takes a sequence and a key head, and its value heads in turn. It makes the
row's factors (`gates.py`), its products with older keys by their decays, and its row of T, as
`chunk_factors.py` does; the row's key, l and T go to the rings, the rest to `DecodeScratch`. Key
and query are columns 0 and 1 of one operand: columns of a product do not influence each other.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.linear.gates import LENGTH_EPS_BITS, decay_of, log_decay, sigmoid
from tpdet.kernels.cuda.linear.products import high_and_low
from tpdet.kernels.cuda.linear.tables import CHUNK, sequence_of
from tpdet.kernels.cuda.pointwise.norm import reciprocal_root

BLOCK = tl.constexpr(16)
_DEPTH = tl.constexpr(32)  # of a product's step: as many registers as one warp has for keys


@triton.jit
def column_of(x, column):
    """A column [64] of x [64, 16], all bits as they are."""
    here = tl.arange(0, BLOCK)[None, :] == column
    bits = tl.sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), axis=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def products_with_older(step, state, number, ring, newest, SHAPE: tl.constexpr):
    """The chunk's keys up to the new row's times key and query: two vectors [64]."""
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    key_head = tl.program_id(1)
    row, small = tl.arange(0, CHUNK), tl.arange(0, BLOCK)[:, None]
    scores = tl.zeros((CHUNK, BLOCK), tl.float32)
    for first in tl.static_range(0, KEY_SIZE, _DEPTH):
        column = key_head * KEY_SIZE + first + tl.arange(0, _DEPTH)[None, :]
        k = tl.load(step.k + number * step.k_stride + column)
        q = tl.load(step.q + number * step.q_stride + column)
        both = tl.where(small == 0, k, tl.where(small == 1, q, tl.zeros_like(q)))
        older = state.keys + (ring + row)[:, None] * (SHAPE.KEY_HEADS * KEY_SIZE) + column
        older = tl.load(older, mask=(row < newest)[:, None], other=0.0)
        keys = tl.where((row == newest)[:, None], k, older)
        scores = tl.dot(keys, tl.trans(both), scores)
    return column_of(scores, 0), column_of(scores, 1)


@triton.jit
def row_of_inverse(state, coupling, ring, newest, head, SHAPE: tl.constexpr):
    """T of the new row, by those above it in its block: stored in the ring."""
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    row, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    own, last = newest // BLOCK * BLOCK, newest % BLOCK
    of_block = state.inverses + ((ring + own) * HEADS + head) * BLOCK
    target = of_block + last * (HEADS * BLOCK)
    inside = (row >= own) & (row < own + BLOCK)
    tl.store(target + row - own, coupling, mask=inside)  # to be read one by one
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(BLOCK - 1):
        above = tl.load(
            of_block + j * (HEADS * BLOCK) + column, mask=column * 0 + j < last, other=0.0
        )
        total = tl.where(column * 0 + j < last, total + tl.load(target + j) * above, total)
    tl.debug_barrier()
    tl.store(target + column, tl.where(column == last, 1.0, total))


@triton.jit
def decode_factors(
    step, gates, state, scratch, tables, scale, SHAPE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid: sequences x key heads; num_warps=1. Sequences with another count are left alone."""
    await_earlier(DEPENDENT)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    index, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number, start, end, slot = sequence_of(tables, index)
    if end - start != 1:
        return
    number = number.to(tl.int64)
    newest = start % CHUNK
    ring = slot * SHAPE.RING + start // CHUNK * CHUNK % SHAPE.RING
    row, one, lane = tl.arange(0, CHUNK), tl.arange(0, 1), tl.arange(0, KEY_SIZE)[None, :]
    # 1. key and query: their lengths, the older keys' products, copies
    k = tl.load(step.k + number * step.k_stride + key_head * KEY_SIZE + lane)
    q = tl.load(step.q + number * step.q_stride + key_head * KEY_SIZE + lane)
    key_factor = tl.sum(reciprocal_root(k.to(tl.float32), 1, LENGTH_EPS_BITS), axis=0)
    query_factor = tl.sum(reciprocal_root(q.to(tl.float32), 1, LENGTH_EPS_BITS), axis=0) * scale
    by_key, by_query = products_with_older(step, state, number, ring, newest, SHAPE)
    tl.store(state.keys + ((ring + newest) * SHAPE.KEY_HEADS + key_head) * KEY_SIZE + lane, k)
    rows = scratch.rows + (index * SHAPE.KEY_HEADS + key_head) * (2 * KEY_SIZE) + lane
    tl.store(rows, k)
    tl.store(rows + KEY_SIZE, q)
    for group in range(SHAPE.GROUP):
        head = key_head * SHAPE.GROUP + group
        # 2. gates and decays
        a = tl.load(step.a + number * step.a_stride + head + one)
        b = tl.load(step.b + number * step.b_stride + head + one)
        of_head = head + one
        log = log_decay(a, tl.load(gates.a_log + of_head), tl.load(gates.dt_bias + of_head))
        log = tl.sum(log, axis=0)
        strength = tl.sum(sigmoid(b), axis=0) * key_factor
        logs = state.decays + (ring + row) * HEADS + head
        logs = tl.load(logs, mask=row < newest, other=0)
        sums = tl.cumsum(tl.where(row == newest, log, logs), axis=0)
        whole = tl.sum(logs, axis=0) + log
        decay = decay_of(whole - sums)
        # 3. kept: l, e and the factors, p and p' in terms, T
        tl.store(state.decays + (ring + newest) * HEADS + head, log)
        of_row = index * HEADS + head
        tl.store(scratch.factors + of_row * 4, decay_of(whole))
        tl.store(scratch.factors + of_row * 4 + 1, strength)
        tl.store(scratch.factors + of_row * 4 + 2, key_factor)
        tl.store(scratch.factors + of_row * 4 + 3, query_factor)
        target = scratch.weights + of_row * (4 * CHUNK) + row
        known = row <= newest
        p = tl.where(known, decay * by_key, 0.0)
        high, low = high_and_low(p, True)
        tl.store(target, high)
        tl.store(target + 2 * CHUNK, low)
        high, low = high_and_low(tl.where(known, decay * by_query, 0.0), True)
        tl.store(target + CHUNK, high)
        tl.store(target + 3 * CHUNK, low)
        row_of_inverse(state, -((strength * key_factor) * p), ring, newest, head, SHAPE)
