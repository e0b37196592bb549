"""The gated delta rule of sequences with one new row: `pass_chunks` for a decode step, in Gluon.

One program takes a sequence, a value head and 16 * TILES columns a warp. It asks for all that it
reads at once, by asynchronous copies into shared memory: registers hold what is being computed
alone, so that several programs of a multiprocessor keep memory busy. Blocks behind the row's own
are neither read nor computed. `decode_factors` has made the rest.

    columns 0 and 1 of right operands [K, 8]: key and query, p and p'; the others are +0
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import reinterpreted
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
)

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
NARROW = gl.constexpr(8)  # columns of the smallest right operand
DEPTH = gl.constexpr(32)  # keys of a state that are computed at a time
BLOCKS = gl.constexpr(4)


class NewRow(NamedTuple):
    """A program's row: sequence, where its chunk begins in the ring, its number there, value head,
    the first of the program's columns."""

    index: Any
    ring: Any
    newest: Any
    head: Any
    column: Any


@gluon.constexpr_function
def read_layout(warps, tiles, rows):
    """Rows [rows, 16 * tiles * warps] of values as products take them: neighbours of a thread."""
    registers = [[0, 1 << i] for i in range(tiles.bit_length())] + [[1, 0], [8, 0]]
    registers += [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], *([0, 2 * tiles << i] for i in range(3))]
    across = [[0, 16 * tiles << i] for i in range(warps.bit_length() - 1)]
    width = 16 * tiles * warps
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows, width])


@gluon.constexpr_function
def aside(width, value_bytes):
    """Rows of `width` values in shared memory, so that rows read together meet in no bank.

    Of fp32 values a thread reads pairs of rows, of bf16 eight rows are read at a time.
    """
    rows_of_line = max(1, 128 // (width * value_bytes))
    apart, phases = (max(2, rows_of_line), 4) if value_bytes == 4 else (rows_of_line, 8)
    return gl.SwizzledSharedLayout(8, apart, min(phases, width // 8), [1, 0])


@gluon.constexpr_function
def copy_layout(warps, width, values):
    """Rows of so many values as they are copied, `values` of a thread side by side."""
    along = min(32, max(1, width // values))
    return gl.BlockedLayout([1, values], [32 // along, along], [warps, 1], [1, 0])


@gluon.jit
def turned(x, WARPS: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [R, 16 * TILES * WARPS], as they were read -> [.., R] in a layout of products.

    A thread's neighbouring columns are rows of its tiles: `column_of_row` says which.
    """
    ROWS: gl.constexpr = x.shape[0]
    x = x.reshape([ROWS, WARPS, 8, TILES, 2]).permute([3, 1, 4, 2, 0])
    return gl.convert_layout(x.reshape([16 * TILES * WARPS, ROWS]), LAYOUT, assert_trivial=True)


@gluon.jit
def column_of_row(row, WARPS: gl.constexpr, TILES: gl.constexpr):
    """Which column a row of the products is."""
    tile, warp = row // (16 * WARPS), row // 16 % WARPS
    return warp * (16 * TILES) + row % 8 * (2 * TILES) + tile * 2 + row // 8 % 2


@gluon.jit
def inside(row, column, SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Which columns of rows are there: all, where programs have whole parts of a head."""
    there = row >= 0
    if SIZE % WIDTH > 0:
        there = there & (column < SIZE)
    return there


@gluon.jit
def ask_for_state(
    new, state, scratch, slot, WARPS: gl.constexpr, WIDTH: gl.constexpr, SHAPE: gl.constexpr
):
    """Copy key and query [8, Dk] and the state's columns [Dk, WIDTH], which are given back."""
    KEY_SIZE: gl.constexpr = SHAPE.KEY_SIZE
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    PAIR: gl.constexpr = copy_layout(WARPS, KEY_SIZE, 8)
    rows = gl.allocate_shared_memory(gl.bfloat16, [NARROW, KEY_SIZE], aside(KEY_SIZE, 2))
    which = gl.arange(0, NARROW, layout=gl.SliceLayout(1, PAIR))[:, None]
    lane = gl.arange(0, KEY_SIZE, layout=gl.SliceLayout(0, PAIR))[None, :]
    of_rows = scratch.rows + (new.index * SHAPE.KEY_HEADS + new.head // SHAPE.GROUP) * (
        2 * KEY_SIZE
    )
    copy_to_shared(rows, of_rows + (which * KEY_SIZE + lane), (which < 2) & (lane >= 0))
    VALUES: gl.constexpr = copy_layout(WARPS, WIDTH, 4)
    kept = gl.allocate_shared_memory(gl.float32, [KEY_SIZE, WIDTH], aside(WIDTH, 4))
    of_state = state.boundary + (slot * HEADS + new.head) * (KEY_SIZE * SHAPE.VALUE_SIZE)
    key = gl.arange(0, KEY_SIZE, layout=gl.SliceLayout(1, VALUES)).to(gl.int64)[:, None]
    column = new.column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, VALUES))[None, :]
    there = inside(key, column, SHAPE.VALUE_SIZE, WIDTH)
    copy_to_shared(kept, of_state + (key * SHAPE.VALUE_SIZE + column), there)
    async_copy.commit_group()
    return rows, kept


@gluon.jit
def ask_for_rows(new, state, WARPS: gl.constexpr, WIDTH: gl.constexpr, SHAPE: gl.constexpr):
    """Copy r of the chunk's older rows and T up to the new one: [4, 16, WIDTH], [4, 16, 16]."""
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    VALUES: gl.constexpr = copy_layout(WARPS, WIDTH, 4)
    LINE: gl.constexpr = aside(WIDTH, 4)
    updates = gl.allocate_shared_memory(gl.float32, [BLOCKS, BLOCK, WIDTH], LINE)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, VALUES)).to(gl.int64)[:, None]
    column = new.column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, VALUES))[None, :]
    of_updates = state.updates + (new.ring * HEADS + new.head) * SHAPE.VALUE_SIZE
    to = reinterpreted(updates, gl.float32, [CHUNK, WIDTH], LINE)
    there = (row < new.newest) & inside(row, column, SHAPE.VALUE_SIZE, WIDTH)
    copy_to_shared(to, of_updates + (row * (HEADS * SHAPE.VALUE_SIZE) + column), there)
    INVERSE: gl.constexpr = copy_layout(WARPS, BLOCK, 4)
    TILE: gl.constexpr = aside(BLOCK, 4)
    inverses = gl.allocate_shared_memory(gl.float32, [BLOCKS, BLOCK, BLOCK], TILE)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, INVERSE))[:, None]
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, INVERSE))[None, :]
    of_inverses = state.inverses + (new.ring * HEADS + new.head) * BLOCK
    to = reinterpreted(inverses, gl.float32, [CHUNK, BLOCK], TILE)
    there = (row <= new.newest) & (lane >= 0)
    copy_to_shared(to, of_inverses + (row * (HEADS * BLOCK) + lane), there)
    return updates, inverses


@gluon.jit
def ask_for_weights(weights, WARPS: gl.constexpr):
    """Copy p and p' of one term, by blocks: [4, 8, 16]."""
    PAIR: gl.constexpr = copy_layout(WARPS, BLOCK, 8)
    LINE: gl.constexpr = aside(BLOCK, 2)
    term = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, NARROW, BLOCK], LINE)
    row = gl.arange(0, BLOCKS * NARROW, layout=gl.SliceLayout(1, PAIR))[:, None]
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, PAIR))[None, :]
    at_weights = weights + (row % NARROW * CHUNK + row // NARROW * BLOCK + lane)
    to = reinterpreted(term, gl.bfloat16, [BLOCKS * NARROW, BLOCK], LINE)
    copy_to_shared(to, at_weights, (row % NARROW < 2) & (lane >= 0))
    return term


@gluon.jit
def pair_of(x, LAYOUT: gl.constexpr):
    """A right operand [K, 8] of rows [8, K] in shared memory."""
    return x.permute((1, 0)).load(right_of(LAYOUT))


@gluon.jit
def column_of(x, column: gl.constexpr, LAYOUT: gl.constexpr):
    """A column [C] of x [C, 8], all bits as they are."""
    here = gl.arange(0, NARROW, layout=gl.SliceLayout(0, LAYOUT))[None, :] == column
    bits = gl.sum(gl.where(here, gl.cast(x, gl.int32, bitcast=True), 0), 1)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def by_state(kept, rows, WARPS: gl.constexpr, TILES: gl.constexpr, SHAPE: gl.constexpr):
    """What a state gives to key and query [C, 8]: both its terms' chains."""
    WIDTH: gl.constexpr = 16 * TILES * WARPS
    LAYOUT: gl.constexpr = small_layout(WARPS)
    READ: gl.constexpr = read_layout(WARPS, TILES, DEPTH)
    small = gl.zeros((WIDTH, NARROW), gl.float32, layout=LAYOUT)
    total = gl.zeros((WIDTH, NARROW), gl.float32, layout=LAYOUT)
    for part in gl.static_range(SHAPE.KEY_SIZE // DEPTH):
        both = pair_of(rows.slice(part * DEPTH, DEPTH, 1), LAYOUT)
        x = kept.slice(part * DEPTH, DEPTH).load(READ)
        high, low = terms(turned(x, WARPS, TILES, left_of(LAYOUT)))
        small = mma_v2(low, both, small)
        total = mma_v2(high, both, total)
    return small + total


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
    TILES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: parts of 16 * TILES * WARPS columns x value heads x sequences; out [M, Hv, Dv]."""
    await_earlier(DEPENDENT)
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    LAYOUT: gl.constexpr = small_layout(WARPS)
    WIDTH: gl.constexpr = 16 * TILES * WARPS
    index, head = gl.program_id(2), gl.program_id(1)
    of_sequence = tables.rows + index * 3
    number = gl.load(of_sequence, volatile=True)  # so that all four come in one turn
    count = gl.load(of_sequence + 1, volatile=True)
    start = gl.load(of_sequence + 2, volatile=True)
    slot = gl.load(tables.states + index * 4, volatile=True).to(gl.int64)
    if count != 1:
        return
    # 1. all that is read
    number = number.to(gl.int64)
    ring = slot * SHAPE.RING + start // CHUNK * CHUNK % SHAPE.RING
    newest = start % CHUNK
    own = newest // BLOCK * BLOCK
    first_column = gl.program_id(0) * WIDTH
    new = NewRow(index, ring, newest, head, first_column)
    rows, kept = ask_for_state(new, state, scratch, slot, WARPS, WIDTH, SHAPE)
    updates, inverses = ask_for_rows(new, state, WARPS, WIDTH, SHAPE)
    weights = scratch.weights + (index * HEADS + head) * (4 * CHUNK)
    highs = ask_for_weights(weights, WARPS)
    lows = ask_for_weights(weights + 2 * CHUNK, WARPS)
    async_copy.commit_group()
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    column = column_of_row(gl.arange(0, WIDTH, layout=BY_COLUMN), WARPS, TILES) + first_column
    live = column < SHAPE.VALUE_SIZE
    value = v + number * v_stride + head * SHAPE.VALUE_SIZE + column
    value = gl.load(value, mask=live, other=0.0).to(gl.float32)
    factors = scratch.factors + (index * HEADS + head) * 4
    begun, strength = gl.load(factors), gl.load(factors + 1)
    of_key, of_query = gl.load(factors + 2), gl.load(factors + 3)
    # 2. what the state gives to key and query
    async_copy.wait_group(1)
    tl.debug_barrier()
    seen = begun * by_state(kept, rows, WARPS, TILES, SHAPE)
    # 3. what earlier blocks give
    none = gl.zeros((WIDTH, NARROW), gl.float32, layout=LAYOUT)
    wide_none = gl.zeros((WIDTH, BLOCK), gl.float32, layout=LAYOUT)
    READ: gl.constexpr = read_layout(WARPS, TILES, BLOCK)
    lower = lower_triangle(LAYOUT)
    chains = (none, none, none)
    async_copy.wait_group(0)
    tl.debug_barrier()
    for block in range(own // BLOCK):
        older = turned(updates.index(block).load(READ), WARPS, TILES, LAYOUT)
        inverse = terms(pair_of(inverses.index(block), LAYOUT))
        w = left_terms(below(older, inverse, lower, wide_none, LAYOUT), LAYOUT)
        high, low = pair_of(highs.index(block), LAYOUT), pair_of(lows.index(block), LAYOUT)
        chains = add_terms(w, (high, low), chains)
    seen = seen + sum_of(chains)
    # 4. the new row's r and w, and o
    block = own // BLOCK
    update = value - of_key * column_of(seen, 0, LAYOUT)
    update = strength * update
    row = own + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    rest = turned(updates.index(block).load(READ), WARPS, TILES, LAYOUT)
    rest = gl.where((row == newest)[None, :], update[:, None], rest)
    inverse = terms(pair_of(inverses.index(block), LAYOUT))
    w = below(rest, inverse, lower, wide_none, LAYOUT)
    deep = own + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, right_of(LAYOUT)))[:, None]
    narrow = gl.arange(0, NARROW, layout=gl.SliceLayout(0, right_of(LAYOUT)))[None, :]
    visible = gl.where((deep <= newest) & (narrow == 1), 1.0, 0.0).to(gl.bfloat16)
    high, low = pair_of(highs.index(block), LAYOUT), pair_of(lows.index(block), LAYOUT)
    of_own = below(w, (high, low), visible, none, LAYOUT)
    result = of_query * column_of(seen + of_own, 1, LAYOUT)
    # 5. stored
    target = (number * HEADS + head) * SHAPE.VALUE_SIZE + column
    gl.store(out + target, result.to(out.dtype.element_ty), mask=live)
    of_row = ((ring + newest) * HEADS + head) * SHAPE.VALUE_SIZE + column
    gl.store(state.updates + of_row, update, mask=live)
