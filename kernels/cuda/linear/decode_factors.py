"""What a sequence's one new row has to do with the older rows of its chunk, for a decode step.

One program takes a sequence and a key head with all of its value heads, which lie side by side:
what it reads comes in one turn, and gates, decays and rows of T of all heads are one computation.
It makes the row's factors (`gates.py`), its products with older keys by their decays, and its row
of T, as `chunk_factors.py` does; the row's key, l and T go to the rings, the rest to
`DecodeScratch`. Key and query are columns 0 and 1 of one operand: columns of a product do not
influence each other.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.linear.gates import LENGTH_EPS_BITS, decay_of, log_decay, sigmoid
from tpdet.kernels.cuda.linear.products import high_and_low
from tpdet.kernels.cuda.linear.tables import CHUNK
from tpdet.kernels.cuda.pointwise.norm import reciprocal_root

BLOCK = tl.constexpr(16)
_NARROW = tl.constexpr(8)  # columns of the smallest right operand
_LANES = tl.constexpr(32)


@triton.jit
def member(x, number, index, AXIS: tl.constexpr):
    """The values of fp32 x where `number` is `index`, along an axis, all bits as they are."""
    bits = tl.where(number == index, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def products_with_older(k, q, keys, newest, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """The chunk's keys up to the new row's times key and query: two vectors [64].

    k, q: pointers to the new row's; keys: to the head's first in the chunk.
    """
    DEPTH: tl.constexpr = FORM[0]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, _NARROW)[:, None]
    of_row = tl.where(row == newest, k, keys + row * (SHAPE.KEY_HEADS * SHAPE.KEY_SIZE))
    of_column = tl.where(column == 0, k, q)
    scores = tl.zeros((CHUNK, _NARROW), tl.float32)
    for part in tl.range(0, SHAPE.KEY_SIZE // DEPTH, num_stages=FORM[1]):
        lane = part * DEPTH + tl.arange(0, DEPTH)[None, :]
        known = tl.load(of_row + lane, mask=row <= newest, other=0.0)
        both = tl.load(of_column + lane, mask=column < 2, other=0.0)
        scores = tl.dot(known, tl.trans(both), scores)
    which = tl.arange(0, _NARROW)[None, :]
    return member(scores, which, 0, 1), member(scores, which, 1, 1)


@triton.jit
def decays_of(logs, log, row, newest):
    """(e [G], decays [G, 64] of the rows up to the new one) by l of the older rows and of its own.

    The new row's own decay is that of no rows, 1: e is computed where it would be.
    """
    whole = tl.sum(logs, axis=1) + log
    behind = whole[:, None] - tl.cumsum(logs, axis=1)
    decay = decay_of(tl.where(row == newest, whole[:, None], behind))
    return member(decay, row, newest, 1), tl.where(row == newest, 1.0, decay)


@triton.jit
def rows_above(block, last, there, STRIDE: tl.constexpr):
    """T of the rows above the new one in its block, [G, 16] each; they lie STRIDE apart."""
    lane = tl.arange(0, BLOCK)[None, :]
    rows = ()
    for j in tl.static_range(BLOCK - 1):
        known = there & (lane * 0 + j < last)
        row = tl.load(block + (j * STRIDE + lane), mask=known, other=0.0)
        rows = rows + (row,)  # type: ignore[assignment] # noqa: RUF005
    return rows


@triton.jit
def row_of_inverse(above, coupling, own, last):
    """T of the new row of each head [G, 16], by those above it in its block.

    coupling [G, 64]: the new row's to all of the chunk; own: the block's first row; last: the new
    row's number in it.
    """
    lane = tl.arange(0, BLOCK)[None, :] + tl.zeros(above[0].shape, tl.int32)
    weights = tl.gather(coupling, own + lane, 1)
    total = tl.zeros_like(above[0])
    for j in tl.static_range(BLOCK - 1):
        weight = tl.gather(weights, lane * 0 + j, 1)
        total = tl.where(j < last, total + weight * above[j], total)
    return tl.where(lane == last, 1.0, total)


@triton.jit
def decode_factors(
    step,
    gates,
    state,
    scratch,
    tables,
    scale,
    SHAPE: tl.constexpr,
    GROUPS: tl.constexpr,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: key heads x sequences. Sequences with another count than one are left alone.

    GROUPS: value heads of a key head, with pads. FORM: how many numbers of keys are read at a time
    and how many such reads are on their way or in use.
    """
    await_earlier(DEPENDENT)
    HEADS: tl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    KEY_SIZE: tl.constexpr = SHAPE.KEY_SIZE
    key_head, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = tl.load(tables.rows + index * 3, volatile=True).to(tl.int64)  # all four in one turn
    count = tl.load(tables.rows + index * 3 + 1, volatile=True)
    start = tl.load(tables.rows + index * 3 + 2, volatile=True)
    slot = tl.load(tables.states + index * 4, volatile=True).to(tl.int64)
    if count != 1:
        return
    newest = start % CHUNK
    own = newest // BLOCK * BLOCK
    ring = slot * SHAPE.RING + start // CHUNK * CHUNK % SHAPE.RING
    group = tl.arange(0, GROUPS)
    head, there = key_head * SHAPE.GROUP + group, group < SHAPE.GROUP
    row, lane = tl.arange(0, CHUNK)[None, :], tl.arange(0, KEY_SIZE)[None, :]
    # 1. what gates and decays are made of, T above the row
    equal = tl.arange(0, _LANES // GROUPS)[None, :] * 0  # each thread of a warp has one
    of_gates, live = head[:, None] + equal, there[:, None] & (equal == 0)
    a = tl.load(step.a + number * step.a_stride + of_gates, mask=live, other=0.0)
    b = tl.load(step.b + number * step.b_stride + of_gates, mask=live, other=0.0)
    a_log = tl.load(gates.a_log + of_gates, mask=live, other=0.0)
    dt_bias = tl.load(gates.dt_bias + of_gates, mask=live, other=0.0)
    of_logs = state.decays + (ring * HEADS + head)[:, None]
    older = there[:, None] & (row < newest)
    logs = tl.load(of_logs + row * HEADS, mask=older, other=0)
    of_block = (state.inverses + ((ring + own) * HEADS + head) * BLOCK)[:, None]
    above = rows_above(of_block, newest - own, there[:, None], HEADS * BLOCK)
    # 2. key and query: copies, the older keys' products, their lengths
    k = step.k + (number * step.k_stride + key_head * KEY_SIZE)
    q = step.q + (number * step.q_stride + key_head * KEY_SIZE)
    keys = state.keys + (ring * SHAPE.KEY_HEADS + key_head) * KEY_SIZE
    which = tl.arange(0, 2)[:, None]
    both = tl.load(tl.where(which == 0, k, q) + lane)
    by_key, by_query = products_with_older(k, q, keys, newest, SHAPE, FORM)
    tl.store(keys + newest * (SHAPE.KEY_HEADS * KEY_SIZE) + lane + which * 0, both, which == 0)
    rows = scratch.rows + (index * SHAPE.KEY_HEADS + key_head) * (2 * KEY_SIZE)
    tl.store(rows + which * KEY_SIZE + lane, both)
    roots = reciprocal_root(both.to(tl.float32), 1, LENGTH_EPS_BITS)
    key_factor = member(roots, tl.arange(0, 2), 0, 0)
    query_factor = member(roots, tl.arange(0, 2), 1, 0) * scale
    # 3. l, e, c and the decays
    log = tl.max(log_decay(a, a_log, dt_bias), axis=1)
    strength = tl.max(sigmoid(b).to(tl.int32, bitcast=True), axis=1)
    strength = strength.to(tl.float32, bitcast=True) * key_factor
    begun, decay = decays_of(logs, log, row, newest)
    of_row = index * HEADS + head
    tl.store(state.decays + (ring + newest) * HEADS + head, log, mask=there)
    factors = scratch.factors + of_row * 4
    tl.store(factors, begun, mask=there)
    tl.store(factors + 1, strength, mask=there)
    tl.store(factors + 2, key_factor + group * 0.0, mask=there)
    tl.store(factors + 3, query_factor + group * 0.0, mask=there)
    # 4. p and p' in terms, T
    target = scratch.weights + (of_row * (4 * CHUNK))[:, None] + row
    known, there = row <= newest, there[:, None]
    p = tl.where(known, decay * by_key[None, :], 0.0)
    high, low = high_and_low(p, True)
    tl.store(target, high, mask=there)
    tl.store(target + 2 * CHUNK, low, mask=there)
    high, low = high_and_low(tl.where(known, decay * by_query[None, :], 0.0), True)
    tl.store(target + CHUNK, high, mask=there)
    tl.store(target + 3 * CHUNK, low, mask=there)
    coupling = -((strength * key_factor)[:, None] * p)
    inverse = row_of_inverse(above, coupling, own, newest - own)
    target = of_block + (newest - own) * (HEADS * BLOCK)
    tl.store(target + tl.arange(0, BLOCK)[None, :], inverse, mask=there)
