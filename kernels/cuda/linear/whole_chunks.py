"""The gated delta rule's pass over whole chunks of 64 new rows, on Hopper: `pass_chunks` without
conditions.

A program takes a sequence, a value head and 64 columns, and goes through the chunks in turn. All is
computed transposed: columns stand on the M side of products, 16 a warp, so that a product's result
is the next one's operand where it lies, in registers. A matrix instruction's two operands may be
exchanged, and `wgmma` and `mma.sync` sum alike: bits are those of `pass_chunks`.

    S'k, S'q, k (d w)'     wgmma     S and d w in registers, k and q in shared memory
    p w, T r, p' w         mma.sync  blocks of 16 x 16, whose terms `chunk_factors` has made

The step's rows and what chunks have made come by the copy engine: keys KEY_STAGES chunks ahead,
all else STAGES.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.variants.chain import send_tile
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import copy_tile, reinterpreted
from tpdet.kernels.cuda.linear.tables import (
    CHUNK,
    INVERSE,
    KEPT,
    KEYS,
    PIECE_FIELDS,
    QUERIES,
    TILES,
    VECTORS,
)
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

COLUMNS = gl.constexpr(64)  # of a program: the height of a warpgroup's instruction
HALF = gl.constexpr(64)  # a swizzled line of keys, and the rows of a copied box
BLOCKS = gl.constexpr(4)
BOX = gl.constexpr(256)  # rows of a copied box of tiles: the most there are
# Vectors of a chunk's rows, in this order.
BEGUN, LEFT, STRENGTH, KEY, QUERY = (gl.constexpr(i) for i in range(5))
SMALL = gl.constexpr(small_layout(4))
RIGHT_OF_SMALL = gl.constexpr(right_of(SMALL.value))
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Vectors of a chunk, as they are loaded."""


class ChunkStream(NamedTuple):
    """A program's shared memory for the step's rows and chunks' factors, and what is copied there.

    KEY_STAGES chunks of k: keys in halves [64, 64]. STAGES of q: halves of 32 rows and of keys
    [32, 64], v: blocks [16, 64], and tiles [16, 16]. Vectors [16] of two chunks.
    """

    k: Any
    q: Any
    v: Any
    tiles: Any
    vectors: Any
    keys_full: Any
    full: Any
    k_tiles: Any
    q_tiles: Any
    v_tiles: Any
    term_tiles: Any


class ChunkRun(NamedTuple):
    """A program's chunks: how many, the first one's row and tile, columns of keys and values."""

    steps: Any
    row: Any
    tile: Any
    key_column: Any
    value_column: Any
    heads: Any


@gluon.constexpr_function
def product_layout(rows):
    """Columns and rows [64, rows], as wgmma has them."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16]
    )


WIDE = gl.constexpr(product_layout(64))
"""64 columns and as many keys or rows."""


@gluon.constexpr_function
def tile_at(term, kind, block, column):
    """Where a block's tile of a term lies; p and p' have block columns up to the block itself."""
    inside = block if kind == INVERSE else block * (block + 1) // 2 + column
    return term * TILES + kind + inside


@gluon.jit
def ask_keys(stream, run, step, SHAPE: gl.constexpr):
    """Copy the keys of a chunk into their slot, if there is such a chunk."""
    HALVES: gl.constexpr = SHAPE.KEY_SIZE // HALF
    if step < run.steps:
        slot = step % stream.keys_full.shape[0]
        barrier = stream.keys_full.index(slot)
        row = run.row + step * CHUNK
        mbarrier.expect(barrier, CHUNK * SHAPE.KEY_SIZE * 2)
        for half in gl.static_range(HALVES):
            column = run.key_column + half * HALF
            copy_tile(stream.k_tiles, [row, column], barrier, stream.k.index(slot * HALVES + half))


@gluon.jit
def ask(stream, run, step, SHAPE: gl.constexpr):
    """Copy the other rows and the tiles of a chunk into their slot, if there is such a chunk."""
    HALVES: gl.constexpr = SHAPE.KEY_SIZE // HALF
    STAGES: gl.constexpr = stream.full.shape[0]
    TERM_BOXES: gl.constexpr = 2 * TILES * BLOCK // BOX
    BYTES: gl.constexpr = CHUNK * (SHAPE.KEY_SIZE + COLUMNS) * 2 + 2 * TILES * BLOCK * BLOCK * 2
    if step < run.steps:
        slot = step % STAGES
        barrier = stream.full.index(slot)
        row = run.row + step * CHUNK
        mbarrier.expect(barrier, BYTES)
        for half in gl.static_range(HALVES):
            column = run.key_column + half * HALF
            for rows in gl.static_range(2):
                to = stream.q.index((slot * 2 + rows) * HALVES + half)
                copy_tile(stream.q_tiles, [row + rows * (CHUNK // 2), column], barrier, to)
        for block in gl.static_range(BLOCKS):
            to = stream.v.index(slot * BLOCKS + block)
            copy_tile(stream.v_tiles, [row + block * BLOCK, run.value_column], barrier, to)
        boxes = reinterpreted(
            stream.tiles, gl.bfloat16, [STAGES * TERM_BOXES, BOX, BLOCK], stream.tiles.layout
        )
        line = (run.tile + step * run.heads) * (2 * TILES * BLOCK)
        for box in gl.static_range(TERM_BOXES):
            to = boxes.index(slot * TERM_BOXES + box)
            copy_tile(stream.term_tiles, [line + box * BOX, 0], barrier, to)


@gluon.jit
def ask_first(stream, run, SHAPE: gl.constexpr):
    """Fill all slots."""
    KEY_STAGES: gl.constexpr = stream.keys_full.shape[0]
    STAGES: gl.constexpr = stream.full.shape[0]
    for stage in gl.static_range(KEY_STAGES):
        ask_keys(stream, run, stage, SHAPE)
    for stage in gl.static_range(STAGES):
        ask(stream, run, stage, SHAPE)


@gluon.jit
def tile(stream, first, KIND: gl.constexpr, BLOCK_ROW: gl.constexpr, AT: gl.constexpr):
    """A tile of p, p' or T in its terms, as a right operand."""
    HIGH: gl.constexpr = tile_at(0, KIND, BLOCK_ROW, AT)
    LOW: gl.constexpr = tile_at(1, KIND, BLOCK_ROW, AT)
    high = stream.tiles.index(first + HIGH).permute((1, 0)).load(RIGHT_OF_SMALL)
    return high, stream.tiles.index(first + LOW).permute((1, 0)).load(RIGHT_OF_SMALL)


@gluon.jit
def vector(stream, step, KIND: gl.constexpr, BLOCK_ROW: gl.constexpr):
    """A vector's values of a block's rows [1, 16]."""
    line = step % 2 * (VECTORS * BLOCKS) + (KIND * BLOCKS + BLOCK_ROW)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SMALL)
    return gl.expand_dims(stream.vectors.index(line).load(BY_ROW), 0)


@gluon.jit
def keep_vectors(stream, step, values):
    """A chunk's vectors go to shared memory."""
    COUNT: gl.constexpr = VECTORS * CHUNK
    flat = reinterpreted(stream.vectors, gl.float32, [2, COUNT], stream.vectors.layout)
    flat.index(step % 2).store(values)


@gluon.jit
def by_state(state, rows, HALVES: gl.constexpr, first, none):
    """S' times rows [64, R]: the chains of both terms, on their way."""
    small, total = none, none
    for half in gl.static_range(HALVES):
        high, low = state[half]
        right = rows.index(first + half).permute((1, 0))
        small = warpgroup_mma(low, right, small, is_async=True)
        total = warpgroup_mma(high, right, total, is_async=True)
    return small, total


@gluon.jit
def in_blocks(x):
    """[64, 64] as four blocks of 16 rows."""
    even, odd = x.reshape([COLUMNS, 2, 2, BLOCK]).permute([0, 3, 1, 2]).split()
    a, c = even.split()
    b, d = odd.split()
    a = gl.convert_layout(a, SMALL, assert_trivial=True)
    b = gl.convert_layout(b, SMALL, assert_trivial=True)
    c = gl.convert_layout(c, SMALL, assert_trivial=True)
    return a, b, c, gl.convert_layout(d, SMALL, assert_trivial=True)


@gluon.jit
def in_halves(x):
    """[64, 32] as two blocks of 16 rows."""
    a, b = x.reshape([COLUMNS, 2, BLOCK]).permute([0, 2, 1]).split()
    a = gl.convert_layout(a, SMALL, assert_trivial=True)
    return a, gl.convert_layout(b, SMALL, assert_trivial=True)


@gluon.jit
def joined(blocks):
    """Four blocks [64, 16] side by side, as the left operand of a wide product."""
    a, b, c, d = blocks
    x = gl.join(gl.join(a, c), gl.join(b, d)).permute([0, 2, 3, 1]).reshape([COLUMNS, CHUNK])
    return gl.convert_layout(x, left_of(WIDE), assert_trivial=True)


@gluon.jit
def in_terms(state, HALVES: gl.constexpr):
    """The terms of a state's halves, as left operands of wide products."""
    operands = ()
    for half in gl.static_range(HALVES):
        operands = with_one_more(operands, left_terms(state[half], WIDE))
    return operands


@gluon.jit
def moved_on(state, moved, whole, stream, first, HALVES: gl.constexpr, none):
    """The halves of a state behind a chunk: its decay times it, and keys by the terms moved."""
    high, low = moved
    sums = ()
    for half in gl.static_range(HALVES):
        right = stream.k.index(first + half)
        small = warpgroup_mma(low, right, none, is_async=True)
        sums = with_one_more(sums, (small, warpgroup_mma(high, right, none, is_async=True)))
    states = ()
    for half in gl.static_range(HALVES):
        small, total = warpgroup_mma_wait(2 * (HALVES - 1 - half), deps=sums[half])
        states = with_one_more(states, whole * state[half] + (small + total))
    return states


@gluon.jit
def open_stream(
    q_tiles,
    k_tiles,
    v_tiles,
    term_tiles,
    HALVES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A program's `ChunkStream`, whose barriers are ready."""
    LINE: gl.constexpr = k_tiles.layout
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = gl.bfloat16
    keys_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(KEY_STAGES):
        mbarrier.init(keys_full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    tl.debug_barrier()
    return ChunkStream(
        gl.allocate_shared_memory(dtype, [KEY_STAGES * HALVES, CHUNK, HALF], LINE),
        gl.allocate_shared_memory(dtype, [STAGES * 2 * HALVES, CHUNK // 2, HALF], LINE),
        gl.allocate_shared_memory(dtype, [STAGES * BLOCKS, BLOCK, COLUMNS], v_tiles.layout),
        gl.allocate_shared_memory(dtype, [STAGES * 2 * TILES, BLOCK, BLOCK], term_tiles.layout),
        gl.allocate_shared_memory(gl.float32, [2 * VECTORS * BLOCKS, BLOCK], PLAIN),
        keys_full,
        full,
        k_tiles,
        q_tiles,
        v_tiles,
        term_tiles,
    )


@gluon.jit
def run_of(tables, index, head, part, SHAPE: gl.constexpr):
    """A sequence's `ChunkRun`, its slot, whether it has drafts, where snapshots are named."""
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    start = gl.load(tables.rows + index * 3 + 2)
    end = start + gl.load(tables.rows + index * 3 + 1)
    first = (start + CHUNK - 1) // CHUNK
    piece = gl.load(tables.states + index * 4 + 3) + first - start // CHUNK
    run = ChunkRun(
        (end + CHUNK - 1) // CHUNK - 1 - first,
        gl.load(tables.rows + index * 3) + first * CHUNK - start,
        piece * HEADS + head,
        head // SHAPE.GROUP * SHAPE.KEY_SIZE,
        head * SHAPE.VALUE_SIZE + part * COLUMNS,
        HEADS,
    )
    slot = gl.load(tables.states + index * 4).to(gl.int64)
    kept = tables.pieces + piece * PIECE_FIELDS + KEPT
    return run, slot, gl.load(tables.states + index * 4 + 2), kept


@gluon.jit
def made_anew(x):
    """x as a value of its own each time, so that what follows from it is made there and then."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def state_pointers(boundary, number, head, part, SHAPE: gl.constexpr):
    """Pointers to a program's columns of a state's first half [64, 64].

    They are made where they are used: a thread has 64 registers of them.
    """
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    column = part * COLUMNS + made_anew(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, WIDE)))
    key = made_anew(gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE)))
    head = boundary + (number * HEADS + head) * (SHAPE.KEY_SIZE * SHAPE.VALUE_SIZE)
    return head + (key[None, :] * SHAPE.VALUE_SIZE + column[:, None])


@gluon.jit
def store_state(boundary, number, head, part, state, SHAPE: gl.constexpr):
    """A program's columns of a state go to its target among the boundaries."""
    at_state = state_pointers(boundary, number, head, part, SHAPE)
    for half in gl.static_range(SHAPE.KEY_SIZE // HALF):
        gl.store(at_state + half * (HALF * SHAPE.VALUE_SIZE), state[half])


@gluon.jit
def send_results(out_tiles, run, step, results):
    """A chunk's results go out, block by block."""
    for block in gl.static_range(BLOCKS):
        row = run.row + step * CHUNK + block * BLOCK
        send_tile(out_tiles, [row, run.value_column], results.index(block))


@gluon.jit
def pass_whole_chunks(
    q_tiles,
    k_tiles,
    v_tiles,
    term_tiles,
    out_tiles,
    vectors,
    boundary,
    tables,
    SHAPE: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: value heads x parts of 64 columns x sequences; num_warps=4.

    A sequence's chunks from the first whole one up to, and without, its last: of a run with drafts
    none. The state goes on from `boundary` and ends there; a snapshot of it goes there too.
    """
    await_earlier(DEPENDENT)
    HEADS: gl.constexpr = SHAPE.KEY_HEADS * SHAPE.GROUP
    HALVES: gl.constexpr = SHAPE.KEY_SIZE // HALF
    NARROW: gl.constexpr = product_layout(CHUNK // 2)
    # 1. the chunks
    head, part, index = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if SHAPE.ALONE:
        index = gl.load(tables.runs + index)
    run, slot, drafts, kept = run_of(tables, index, head, part, SHAPE)
    if (run.steps <= 0) | (drafts != 0):
        return
    steps = run.steps
    # 2. shared memory; the first chunks are asked for
    dtype: gl.constexpr = gl.bfloat16
    results = gl.allocate_shared_memory(dtype, [BLOCKS, BLOCK, COLUMNS], out_tiles.layout)
    stream = open_stream(q_tiles, k_tiles, v_tiles, term_tiles, HALVES, KEY_STAGES, STAGES)
    ask_first(stream, run, SHAPE)
    COUNT: gl.constexpr = VECTORS * CHUNK
    lane = gl.arange(0, COUNT, layout=FLAT)
    of_chunk = vectors + gl.cast(run.tile, gl.int64) * COUNT
    keep_vectors(stream, 0, gl.load(of_chunk + lane))
    whole = gl.load(of_chunk + (BEGUN * CHUNK + CHUNK - 1))
    target = gl.load(kept)
    # 3. the state, and what stays the same
    at_state = state_pointers(boundary, slot, head, part, SHAPE)
    state = ()
    for half in gl.static_range(HALVES):
        state = with_one_more(state, gl.load(at_state + half * (HALF * SHAPE.VALUE_SIZE)))
    lower = lower_triangle(SMALL)
    none = gl.zeros((COLUMNS, BLOCK), gl.float32, layout=SMALL)
    wide_none = gl.zeros((COLUMNS, HALF), gl.float32, layout=WIDE)
    narrow_none = gl.zeros((COLUMNS, CHUNK // 2), gl.float32, layout=NARROW)
    tl.debug_barrier()
    for step in range(steps):
        key_slot, slot_of_step = step % KEY_STAGES, step % STAGES
        tiles = slot_of_step * (2 * TILES)
        of_chunk += HEADS * COUNT
        there = lane < gl.where(step + 1 < steps, COUNT, 0)
        coming = gl.load(of_chunk + lane, mask=there, other=0.0)
        mbarrier.wait(stream.keys_full.index(key_slot), step // KEY_STAGES & 1)
        if target >= 0:
            store_state(boundary, gl.cast(target, gl.int64), head, part, state, SHAPE)
        # 4. what the state gives to keys
        operands = in_terms(state, HALVES)
        of_low, of_high = by_state(operands, stream.k, HALVES, key_slot * HALVES, wide_none)
        of_low, of_high = warpgroup_mma_wait(0, deps=(of_low, of_high))
        of_state = in_blocks(of_low + of_high)
        # 5. blocks in turn
        w = ()
        high_of_moved = ()
        low_of_moved = ()
        tma.store_wait(0)
        tl.debug_barrier()
        mbarrier.wait(stream.full.index(slot_of_step), step // STAGES & 1)
        for block in gl.static_range(BLOCKS):
            if block % 2 == 0:
                q_first = (slot_of_step * 2 + block // 2) * HALVES
                of_low, of_high = by_state(operands, stream.q, HALVES, q_first, narrow_none)
            of_keys = (none, none, none)
            of_queries = (none, none, none)
            for j in gl.static_range(block):
                of_keys = add_terms(w[j], tile(stream, tiles, KEYS, block, j), of_keys)
                weights = tile(stream, tiles, QUERIES, block, j)
                of_queries = add_terms(w[j], weights, of_queries)
            begun = vector(stream, step, BEGUN, block)
            by_keys = begun * of_state[block] + sum_of(of_keys)
            value = stream.v.index(slot_of_step * BLOCKS + block).permute((1, 0)).load(SMALL)
            rest = value.to(gl.float32) - vector(stream, step, KEY, block) * by_keys
            rest = vector(stream, step, STRENGTH, block) * rest
            inverse = tile(stream, tiles, INVERSE, block, block)
            new = below(rest, inverse, lower, none, SMALL)
            if block < BLOCKS - 1:
                w = with_one_more(w, left_terms(new, SMALL))
            high, low = terms(vector(stream, step, LEFT, block) * new)
            high_of_moved = with_one_more(high_of_moved, high)
            low_of_moved = with_one_more(low_of_moved, low)
            if block % 2 == 0:
                of_low, of_high = warpgroup_mma_wait(0, deps=(of_low, of_high))
                of_queries_by_state = in_halves(of_low + of_high)
            seen = begun * of_queries_by_state[block % 2] + sum_of(of_queries)
            own = tile(stream, tiles, QUERIES, block, block)
            seen = seen + below(new, own, lower, none, SMALL)
            result = (vector(stream, step, QUERY, block) * seen).to(dtype)
            results.index(block).permute((1, 0)).store(result)
        # 6. rows go out and come in
        keep_vectors(stream, step + 1, coming)
        fence_async_shared()
        tl.debug_barrier()
        send_results(out_tiles, run, step, results)
        ask(stream, run, step + STAGES, SHAPE)
        # 7. the state moves on
        moved = joined(high_of_moved), joined(low_of_moved)
        state = moved_on(state, moved, whole, stream, key_slot * HALVES, HALVES, wide_none)
        whole = gl.load(of_chunk + (BEGUN * CHUNK + CHUNK - 1), mask=step + 1 < steps, other=0.0)
        kept += PIECE_FIELDS
        target = gl.load(kept, mask=step + 1 < steps, other=-1)
        tl.debug_barrier()
        ask_keys(stream, run, step + KEY_STAGES, SHAPE)
    store_state(boundary, slot, head, part, state, SHAPE)
    tma.store_wait(0)
