"""Merging the splits of a row in ascending order, in a separate launch: for many splits.

    m'_i = max(m_0 .. m_i),  a_i = exp2(m'_(i-1) - m'_i),  b_i = exp2(m_i - m'_i)
    o' = (o' * a_i) + (o_i * b_i)

is `split.merge` split after split. A maximum has no order, so the factors of a chunk of splits and
the products with b are taken side by side; what remains is a chain of one product and one sum a
split, on values that wait in shared memory.

    S        listed sequences: short [S, 2] int32 (sequence, the first of its listed splits)
    D, LANES lanes of a head, and with the pad to a power of two
    m, a, b  [CHUNK] fp32 by split; o [CHUNK, LANES] fp32
    states   the workspace, `SplitStates`
    sinks [Hq] fp32, read if SINKS
    out [M, Hq, D]: bf16, fp16 or fp32
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.attention.split import LOG2_E, PAGE, UNSEEN, merge_factors
from tpdet.kernels.cuda.launch.dependent import await_earlier

_SHARED = gl.shared_memory_descriptor
as_lines = getattr(_SHARED, "reinterpret", None) or _SHARED._reinterpret  # Triton 3.6
_UNROLL = gl.constexpr(8)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _factors(
    states,
    at,
    stride,
    chunk,
    end,
    largest,
    CHUNK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """a, b, mass * b of CHUNK splits from `chunk` on, and the maximum after them."""
    index = gl.arange(0, CHUNK, layout=LAYOUT)
    live = chunk + index < end
    state = (chunk + index).to(gl.int64) * stride + at
    own = gl.load(states.largest + state, mask=live, other=UNSEEN)
    mass = gl.load(states.mass + state, mask=live, other=0.0)
    before = gl.load(states.largest + (state - stride), mask=live & (index > 0), other=UNSEEN)
    before = gl.maximum(gl.associative_scan(before, 0, _larger), largest)
    raised, a, b = merge_factors(before, own)
    return a, b, mass * b, gl.max(raised, 0)


@gluon.jit(do_not_specialize=["window", "row_count", "short_rows"])
def merge_splits(
    out,
    states,
    sinks,
    short,
    rows,
    window,
    row_count,
    short_rows,
    SHAPE: gl.constexpr,
    CHUNK: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: short [S, 2] x tokens x query heads: one row's splits in ascending order. num_warps=4.

    CHUNK splits, at least 8, are loaded together.
    """
    await_earlier(DEPENDENT)
    KEY_HEADS: gl.constexpr = SHAPE.KEY_HEADS
    GROUP: gl.constexpr = SHAPE.GROUP
    HEAD: gl.constexpr = SHAPE.HEAD
    LANES: gl.constexpr = SHAPE.LANES
    # 1. layouts and shared memory of a chunk
    QUADS: gl.constexpr = LANES // 4 if LANES < 128 else 32
    ACROSS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // QUADS, QUADS], [4, 1], [1, 0])
    BY_SPLIT: gl.constexpr = gl.SliceLayout(1, ACROSS)
    BY_LANE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values = gl.allocate_shared_memory(gl.float32, [CHUNK, LANES], PLAIN)
    shrinks = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], PLAIN)
    masses = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], PLAIN)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    value_lines = as_lines(values, gl.float32, [CHUNK, LANES], LINE)
    shrink_lines = as_lines(shrinks, gl.float32, [CHUNK, 1], LINE)
    mass_lines = as_lines(masses, gl.float32, [CHUNK, 1], LINE)
    # 2. this program's token and query head, and the splits that it sees: [begin, end)
    query_head = gl.program_id(0) % (KEY_HEADS * GROUP)
    work = gl.program_id(0) // (KEY_HEADS * GROUP)
    token = work % short_rows
    sequence = gl.load(short + work // short_rows * 2)
    first_pair = gl.load(short + work // short_rows * 2 + 1)
    first_row = gl.load(rows + sequence * 3)
    count = gl.load(rows + sequence * 3 + 1)
    start = gl.load(rows + sequence * 3 + 2)
    if token < count:
        position = start + token
        row = token * GROUP + query_head % GROUP
        stride = KEY_HEADS * row_count
        at = (first_pair * KEY_HEADS + query_head // GROUP) * row_count + row
        end = position // PAGE + 1  # the row sees every split from the first to here
        begin = 0 * end
        if SHAPE.WINDOW:
            begin = gl.maximum(position - window + 1, 0) // PAGE
        largest = gl.full((), UNSEEN, gl.float32)
        mass = gl.zeros((1,), gl.float32, layout=BY_LANE)
        if SHAPE.SINKS:
            one = gl.zeros((1,), gl.int32, layout=BY_LANE)
            largest = gl.max(gl.load(sinks + (query_head + one)) * LOG2_E, 0)
            mass = gl.full((1,), 1.0, gl.float32, layout=BY_LANE)
        total = gl.zeros((LANES,), gl.float32, layout=BY_LANE)
        for chunk in range(begin, end, CHUNK):
            # 3. factors and products of the chunk, side by side, to shared memory
            split = chunk + gl.arange(0, CHUNK, layout=BY_SPLIT)
            lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, ACROSS))
            state = (split.to(gl.int64) * stride + at)[:, None] * HEAD + lane[None, :]
            there = (split < end)[:, None] & (lane < HEAD)[None, :]
            value = gl.load(states.total + state, mask=there, other=0.0)
            a, b, weighed, largest = _factors(
                states, at, stride, chunk, end, largest, CHUNK, BY_LANE
            )
            tl.debug_barrier()
            values.store(value * gl.convert_layout(b, BY_SPLIT)[:, None])
            shrinks.store(gl.convert_layout(a, BY_SPLIT)[:, None])
            masses.store(gl.convert_layout(weighed, BY_SPLIT)[:, None])
            tl.debug_barrier()
            # 4. the chain over its splits
            steps = gl.minimum(end - chunk, CHUNK)
            for group in range(0, steps, _UNROLL):
                for i in gl.static_range(_UNROLL):
                    step = gl.minimum(group + i, steps - 1)
                    shrink = shrink_lines.index(step).load(BY_LANE)
                    more_mass = mass_lines.index(step).load(BY_LANE)
                    more = value_lines.index(step).load(BY_LANE)
                    inside = group + i < steps
                    mass = gl.where(inside, mass * shrink + more_mass, mass)
                    total = gl.where(inside, total * shrink + more, total)
        # 5. the result of the row
        result = total * gl.div_rn(gl.full((1,), 1.0, gl.float32, layout=BY_LANE), mass) + 0.0
        lane = gl.arange(0, LANES, layout=BY_LANE)
        to = (first_row + token + 0 * lane).to(gl.int64) * (KEY_HEADS * GROUP) + query_head
        gl.store(out + (to * HEAD + lane), result.to(out.dtype.element_ty), mask=lane < HEAD)
