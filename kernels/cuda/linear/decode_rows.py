"""The gated delta rule of sequences with one new row: `pass_chunks` for a decode step, in Gluon.

One program takes a sequence, a value head and 16 columns a warp. Every warp reads its columns of
the state and of the chunk's older rows once, each thread what its products take, so that nothing
passes through shared memory and no warp waits for another. `decode_factors` has made the rest.

    columns 0 and 1 of right operands [K, 8]: key and query, p and p'; the others are +0
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.linear.tables import CHUNK
from tpdet.kernels.cuda.linear.transposed import (
    BLOCK,
    add_terms,
    below,
    left_of,
    left_terms,
    lower_triangle,
    right_of,
    small_layout,
    sum_of,
    terms,
    with_one_more,
)

NARROW = gl.constexpr(8)  # columns of the smallest right operand
DEPTH = gl.constexpr(32)  # keys of a state that are read at a time


@gluon.constexpr_function
def read_layout(warps, rows):
    """Rows [rows, 16 * warps] of values as they are read: two neighbouring columns a thread."""
    registers = [[0, 1], [1, 0], [8, 0]]
    registers += [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]]
    across = [[0, 16 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows, 16 * warps])


@gluon.jit
def turned(x, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [R, 16 * WARPS], as they were read -> [16 * WARPS, R] in a layout of products.

    Of a warp's columns the even ones come first: product row 8 * j + i is column 2 * i + j.
    """
    ROWS: gl.constexpr = x.shape[0]
    x = x.reshape([ROWS, WARPS, 8, 2]).permute([1, 3, 2, 0]).reshape([16 * WARPS, ROWS])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def older_rows(state, ring, head, column, first, known, WARPS: gl.constexpr, SHAPE: gl.constexpr):
    """r of a block's rows, transposed [C, 16]; +0 of rows that are not known."""
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    READ: gl.constexpr = read_layout(WARPS, BLOCK)
    row = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, READ))
    across = column + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(0, READ))
    updates = state.updates + ((ring + row) * HEADS + head)[:, None] * SHAPE.VALUE_SIZE
    live = (row < known)[:, None] & (across < SHAPE.VALUE_SIZE)[None, :]
    x = gl.load(updates + across[None, :], mask=live, other=0.0)
    return turned(x, WARPS, small_layout(WARPS))


@gluon.jit
def inverse_of(state, ring, head, first, known, WARPS: gl.constexpr, SHAPE: gl.constexpr):
    """T of a block in its terms, as a right operand; +0 of rows that are not known."""
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    RIGHT: gl.constexpr = right_of(small_layout(WARPS))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RIGHT))
    row = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, RIGHT))
    inverses = state.inverses + (((ring + row) * HEADS + head) * BLOCK)[None, :]
    return terms(gl.load(inverses + column[:, None], mask=(row < known)[None, :], other=0.0))


@gluon.jit
def pair(x, stride, count, DEEP: gl.constexpr, WARPS: gl.constexpr):
    """A right operand [DEEP, 8] of two vectors, `stride` values apart; +0 from `count` on."""
    RIGHT: gl.constexpr = right_of(small_layout(WARPS))
    deep = gl.arange(0, DEEP, layout=gl.SliceLayout(1, RIGHT))[:, None]
    column = gl.arange(0, NARROW, layout=gl.SliceLayout(0, RIGHT))[None, :]
    live = (column < 2) & (deep < count)
    return gl.load(x + (column * stride + deep), mask=live, other=0.0)


@gluon.jit
def column_of(x, column: gl.constexpr, LAYOUT: gl.constexpr):
    """A column [C] of x [C, 8], all bits as they are."""
    here = gl.arange(0, NARROW, layout=gl.SliceLayout(0, LAYOUT))[None, :] == column
    bits = gl.sum(gl.where(here, gl.cast(x, gl.int32, bitcast=True), 0), 1)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def decode_rows(
    v,
    v_stride,
    state,
    scratch,
    tables,
    out,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: sequences x value heads x parts of 16 * WARPS columns; out [M, Hv, Dv]."""
    await_earlier(DEPENDENT)
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    KEY_SIZE: gl.constexpr = SHAPE.KEY_SIZE
    LAYOUT: gl.constexpr = small_layout(WARPS)
    WIDTH: gl.constexpr = 16 * WARPS
    index, head = gl.program_id(0), gl.program_id(1)
    first_column = gl.program_id(2) * WIDTH
    start = gl.load(tables.rows + index * 3 + 2)
    if gl.load(tables.rows + index * 3 + 1) != 1:
        return
    number = gl.load(tables.rows + index * 3).to(gl.int64)
    slot = gl.load(tables.states + index * 4).to(gl.int64)
    ring = slot * SHAPE.RING + start // CHUNK * CHUNK % SHAPE.RING
    newest = start % CHUNK
    own = newest // BLOCK * BLOCK
    # 1. all that is read of the state and the older rows
    READ: gl.constexpr = read_layout(WARPS, DEPTH)
    key = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, READ))
    across = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, READ))
    at_state = state.boundary + (slot * HEADS + head) * (KEY_SIZE * SHAPE.VALUE_SIZE)
    at_state += key[:, None] * SHAPE.VALUE_SIZE + across[None, :]
    there = (key[:, None] >= 0) & (across < SHAPE.VALUE_SIZE)[None, :]
    parts = ()
    for first in gl.static_range(0, KEY_SIZE, DEPTH):
        parts = with_one_more(
            parts, gl.load(at_state + first * SHAPE.VALUE_SIZE, mask=there, other=0.0)
        )
    older = ()
    for block in gl.static_range(3):
        known = gl.where(block * BLOCK < own, CHUNK, 0)
        x = older_rows(state, ring, head, first_column, block * BLOCK, known, WARPS, SHAPE)
        older = with_one_more(older, x)
    rest = older_rows(state, ring, head, first_column, own, newest, WARPS, SHAPE)
    # 2. what the state gives to key and query
    none = gl.zeros((WIDTH, NARROW), gl.float32, layout=LAYOUT)
    wide_none = gl.zeros((WIDTH, BLOCK), gl.float32, layout=LAYOUT)
    rows = scratch.rows + (index * SHAPE.KEY_HEADS + head // SHAPE.GROUP) * (2 * KEY_SIZE)
    small = none
    total = none
    for slice in gl.static_range(KEY_SIZE // DEPTH):
        both = pair(rows + slice * DEPTH, KEY_SIZE, DEPTH, DEPTH, WARPS)
        high, low = terms(parts[slice])
        small = mma_v2(turned(low, WARPS, left_of(LAYOUT)), both, small)
        total = mma_v2(turned(high, WARPS, left_of(LAYOUT)), both, total)
    factors = scratch.factors + (index * HEADS + head) * 4
    seen = gl.load(factors) * (small + total)
    # 3. what earlier blocks give
    weights = scratch.weights + (index * HEADS + head) * (4 * CHUNK)
    lower = lower_triangle(LAYOUT)
    chains = (none, none, none)
    for block in gl.static_range(3):
        first = block * BLOCK
        known = gl.where(first < own, CHUNK, 0)
        inverse = inverse_of(state, ring, head, first, known, WARPS, SHAPE)
        w = left_terms(below(older[block], inverse, lower, wide_none, LAYOUT), LAYOUT)
        high = pair(weights + first, CHUNK, known, BLOCK, WARPS)
        low = pair(weights + (2 * CHUNK + first), CHUNK, known, BLOCK, WARPS)
        chains = add_terms(w, (high, low), chains)
    seen = seen + sum_of(chains)
    # 4. the new row's r and w, and o
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    place_of_column = gl.arange(0, WIDTH, layout=BY_COLUMN)
    column = place_of_column // 16 * 16 + place_of_column % 8 * 2 + place_of_column // 8 % 2
    column = first_column + column
    live = column < SHAPE.VALUE_SIZE
    value = v + number * v_stride + head * SHAPE.VALUE_SIZE + column
    value = gl.load(value, mask=live, other=0.0).to(gl.float32)
    update = value - gl.load(factors + 2) * column_of(seen, 0, LAYOUT)
    update = gl.load(factors + 1) * update
    row = own + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    rest = gl.where((row == newest)[None, :], update[:, None], rest)
    inverse = inverse_of(state, ring, head, own, newest + 1, WARPS, SHAPE)
    w = below(rest, inverse, lower, wide_none, LAYOUT)
    RIGHT: gl.constexpr = right_of(LAYOUT)
    deep = own + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RIGHT))[:, None]
    narrow = gl.arange(0, NARROW, layout=gl.SliceLayout(0, RIGHT))[None, :]
    visible = gl.where((deep <= newest) & (narrow == 0), 1.0, 0.0).to(gl.bfloat16)
    own_weights = weights + CHUNK + deep + narrow * 0
    mask = (deep <= newest) & (narrow == 0)
    high = gl.load(own_weights, mask=mask, other=0.0)
    low = gl.load(own_weights + 2 * CHUNK, mask=mask, other=0.0)
    of_own = below(w, (high, low), visible, none, LAYOUT)
    result = gl.load(factors + 3) * (column_of(seen, 1, LAYOUT) + column_of(of_own, 0, LAYOUT))
    # 5. stored
    target = (number * HEADS + head) * SHAPE.VALUE_SIZE + column
    gl.store(out + target, result.to(out.dtype.element_ty), mask=live)
    kept = ((ring + newest) * HEADS + head) * SHAPE.VALUE_SIZE + column
    gl.store(state.updates + kept, update, mask=live)
