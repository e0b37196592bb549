"""Warp-specialised prefill attention: one producer warp, two consumer warpgroups.

    q, out    [M, Hq, D] of `AttentionOperands`, 2-byte values
    k_tiles, v_tiles    the pages [P * Hkv * 256, D] in blocks of [64, D]
    blocks [T, 2], rows [B, 3], tables [B, widest]    int32, as in `items.py`; pages of a sequence
    GROUP     query heads that share a key head: Hq / Hkv
    suffixes  _F, _S, _L of row vectors: laid out for loads of q, by score, by lane of the output

The arithmetic is that of `split.py`, tile for tile. A program takes items of 128 rows of one key
head, 64 for each consumer, and both read the tiles that the producer copies, which goes on to the
next item while they end this one. Within a consumer the scores of tile j + 1 begin before the
products p . v of tile j, and its exponentials are taken while those run (Shah et al. 2024,
FlashAttention-3, arXiv 2407.08608, algorithm 2); the consumers drift apart, so that one's
exponentials hide behind the other's products.

Hopper only, heads of 128 at most: two fp32 states of a row must fit a thread's registers.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tpdet.kernels.cuda.attention.items import item_of
from tpdet.kernels.cuda.attention.split import (
    BEYOND,
    PAGE,
    TILE,
    TILES,
    UNSEEN,
    merge,
    row_result,
    sees,
    sees_split,
)
from tpdet.kernels.cuda.attention.whole_split import (
    MASSES,
    OPERAND_WIDTH,
    Pipeline,
    begin_scores,
    begin_sums,
    shrink_sums,
    tile_weights,
    whole_split,
)
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    CONSUMERS,
    accumulator_layout,
    allocate_barriers,
    copy_tile,
    expect,
    init_barriers,
    release,
    run_warps,
    slot_of,
    wait_free,
    wait_full,
)

PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


@gluon.constexpr_function
def _load_layout():
    """A layout of [64, lanes of a head] between global and shared memory: 16 bytes a thread."""
    return gl.BlockedLayout(
        size_per_thread=[1, 8], threads_per_warp=[2, 16], warps_per_cta=[4, 1], order=[1, 0]
    )


@gluon.jit
def _produce(
    k_tiles,
    v_tiles,
    pipeline,
    blocks,
    rows,
    tables,
    items,
    widest,
    window,
    SHAPE: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """The producer warp: every item's tiles of K and V, one after another."""
    step = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        sequence, head, _row, _first, _at, _count, _start, begin, _rest, _whole, end = item_of(
            turn, items, blocks, rows, window, SHAPE, BLOCK
        )
        table = tables + sequence * widest
        for tile in range(begin, end):
            slot = slot_of(pipeline.free, step)
            split = tile // TILES
            page = gl.load(table + split) * SHAPE.KEY_HEADS + head
            at = page * PAGE + (tile - split * TILES) * TILE
            wait_free(pipeline.free, step)
            expect(pipeline.k_full, slot, k_tiles.block_type.nbytes)
            copy_tile(k_tiles, [at, 0], pipeline.k_full.index(slot), pipeline.k.index(slot))
            expect(pipeline.v_full, slot, v_tiles.block_type.nbytes)
            copy_tile(v_tiles, [at, 0], pipeline.v_full.index(slot), pipeline.v.index(slot))
            step += 1


@gluon.jit
def _mask(score, tile, whole, position, window, WINDOW: gl.constexpr, BY_KEY: gl.constexpr):
    """Scores; from tile `whole` on those of unseen keys fall below every other."""
    if tile >= whole:
        key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, BY_KEY))
        seen = sees(key[None, :], position[:, None], window, WINDOW)
        score = gl.where(seen, score, BEYOND)
    return score


@gluon.jit
def _load_rows(operands, q_rows, row, first, first_row, count, head, SHAPE: gl.constexpr):
    """The consumer's query rows from `row` on, to shared memory; those past `count` are zeros."""
    GROUP: gl.constexpr = SHAPE.GROUP
    HEAD: gl.constexpr = SHAPE.HEAD
    FLAT: gl.constexpr = _load_layout()
    row_F = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, FLAT))
    token = first + row_F // GROUP
    column = (head * GROUP + row_F % GROUP) * HEAD
    at = (first_row + token).to(gl.int64) * operands.q_stride + column
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, FLAT))
    live = (token < count)[:, None]
    q_rows.store(gl.load(operands.q + at[:, None] + lane[None, :], mask=live, other=0.0))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _visible(split, position, window, WINDOW: gl.constexpr, BY_LANE: gl.constexpr):
    """Whether each row sees a key of the split."""
    return gl.convert_layout(sees_split(split, position, window, WINDOW), BY_LANE)


@gluon.jit
def _merge_into(largest, mass, total, m, w, o, seen, BY_LANE: gl.constexpr):
    """A finished split onto the row state, whose vectors are laid out by lane, where `seen`."""
    other = gl.convert_layout(m, BY_LANE)
    return merge(largest, mass, total, seen, other, gl.convert_layout(gl.max(w, 1), BY_LANE), o)


@gluon.jit
def _attend(
    q,
    pipeline,
    ones,
    position,
    start,
    count,
    taken,
    begin,
    rest,
    whole,
    end,
    window,
    scale,
    HEAD: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Mass [R] and total [R, D] over an item's tiles, of which the first is step `taken`."""
    BY_KEY: gl.constexpr = accumulator_layout(TILE)
    WIDE: gl.constexpr = accumulator_layout(HEAD)
    NARROW: gl.constexpr = accumulator_layout(MASSES)
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, BY_KEY)
    BY_LANE: gl.constexpr = gl.SliceLayout(1, WIDE)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, WIDE, OPERAND_WIDTH)
    MASS_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, NARROW, OPERAND_WIDTH)
    dtype: gl.constexpr = pipeline.k.dtype
    largest = gl.full((CONSUMER_ROWS,), UNSEEN, gl.float32, layout=BY_LANE)
    mass = gl.zeros((CONSUMER_ROWS,), gl.float32, layout=BY_LANE)
    total = gl.zeros((CONSUMER_ROWS, HEAD), gl.float32, layout=WIDE)
    # 1. whole splits, of which every row sees every key
    for split in range(0, (rest - begin) // TILES):
        m, w, o = whole_split(q, pipeline, ones, taken + split * TILES, scale, HEAD)
        seen = gl.full((CONSUMER_ROWS,), True, gl.int1, layout=BY_LANE)
        largest, mass, total = _merge_into(largest, mass, total, m, w, o, seen, BY_LANE)

    # 2. scores and weights of the first tile of the rest
    m = gl.full((CONSUMER_ROWS,), UNSEEN, gl.float32, layout=BY_SCORE)
    w = gl.zeros((CONSUMER_ROWS, MASSES), gl.float32, layout=NARROW)
    o = gl.zeros((CONSUMER_ROWS, HEAD), gl.float32, layout=WIDE)
    before = taken + rest - begin
    score = begin_scores(q, pipeline, before)
    score = warpgroup_mma_wait(0, deps=(score,))
    score = _mask(score, rest, whole, position, window, WINDOW, BY_KEY)
    m, shrink, weight = tile_weights(score, scale, m, dtype, WEIGHT)
    for tile in range(rest + 1, end):
        # 3. begin this tile's scores and the sums of the tile before
        scores = begin_scores(q, pipeline, before + 1)
        sums, masses = begin_sums(weight, pipeline, ones, before, o, w, MASS_WEIGHT)
        # 4. weights of this tile, while those sums run; a split starts from a fresh maximum
        score = warpgroup_mma_wait(2, deps=(scores,))
        fresh = tile % TILES == 0
        score = _mask(score, tile, whole, position, window, WINDOW, BY_KEY)
        ended = m
        earlier = gl.where(fresh, UNSEEN, m)
        m, shrink, next_weight = tile_weights(score, scale, earlier, dtype, WEIGHT)
        # 5. the sums of the tile before end; its slot is free
        o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
        release(pipeline.free, before)
        # 6. a finished split merges into the state
        if fresh:
            seen = _visible(tile // TILES - 1, position, window, WINDOW, BY_LANE)
            largest, mass, total = _merge_into(largest, mass, total, ended, w, o, seen, BY_LANE)
            o = gl.zeros((CONSUMER_ROWS, HEAD), gl.float32, layout=WIDE)
            w = gl.zeros((CONSUMER_ROWS, MASSES), gl.float32, layout=NARROW)
        else:
            o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
        weight = next_weight
        before += 1

    # 7. the last tile: what follows the last key may be NaN, and 0 * NaN is NaN, so both consumers
    #    write zeros there
    values = pipeline.v.index(slot_of(pipeline.v_full, before))
    if end * TILE > start + count:
        wait_full(pipeline.v_full, before)
        FLAT: gl.constexpr = _load_layout()
        key = (end - 1) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, FLAT))
        clean = values.load(FLAT)
        values.store(gl.where((key < start + count)[:, None], clean, 0.0))
        fence_async_shared()
        tl.debug_barrier()
    sums, masses = begin_sums(weight, pipeline, ones, before, o, w, MASS_WEIGHT)
    o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
    release(pipeline.free, before)
    seen = _visible((end - 1) // TILES, position, window, WINDOW, BY_LANE)
    largest, mass, total = _merge_into(largest, mass, total, m, w, o, seen, BY_LANE)
    return mass, total


@gluon.jit
def _consume(
    consumer,
    pipeline,
    q_rows,
    operands,
    ones,
    blocks,
    rows,
    items,
    window,
    SHAPE: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """A consumer warpgroup, 0 or 1: 64 rows of every item; writes their results."""
    GROUP: gl.constexpr = SHAPE.GROUP
    HEAD: gl.constexpr = SHAPE.HEAD
    BY_KEY: gl.constexpr = accumulator_layout(TILE)
    WIDE: gl.constexpr = accumulator_layout(HEAD)
    BY_LANE: gl.constexpr = gl.SliceLayout(1, WIDE)
    taken = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        _, head, row, first, first_row, count, start, begin, rest, whole, end = item_of(
            turn, items, blocks, rows, window, SHAPE, BLOCK
        )
        if end > 0:
            # 1. query rows to shared memory
            row += consumer * CONSUMER_ROWS
            _load_rows(operands, q_rows, row, first, first_row, count, head, SHAPE)
            row_S = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_KEY))
            position = start + first + row_S // GROUP
            # 2. all tiles of the item
            mass, total = _attend(
                q_rows,
                pipeline,
                ones,
                position,
                start,
                count,
                taken,
                begin,
                rest,
                whole,
                end,
                window,
                operands.scale,
                HEAD,
                SHAPE.WINDOW,
            )
            taken += end - begin
            # 3. results of the rows that hold a token
            row_L = row + gl.arange(0, CONSUMER_ROWS, layout=BY_LANE)
            token = first + row_L // GROUP
            live = token < count
            result = row_result(mass, total, live)
            to = (first_row + token).to(gl.int64) * (SHAPE.KEY_HEADS * GROUP * HEAD)
            column = (head * GROUP + row_L % GROUP) * HEAD
            lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, WIDE))
            out_at = operands.out + (to + column)[:, None] + lane[None, :]
            gl.store(out_at, result.to(operands.out.dtype.element_ty), mask=live[:, None])


@gluon.jit(do_not_specialize=["items", "widest", "window"])
def attend_warp_specialised(
    operands,
    k_tiles,
    v_tiles,
    blocks,
    rows,
    tables,
    items,
    widest,
    window,
    SHAPE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`attend_blocks`, whose docstring has the shapes, of 128 rows an item; num_warps=4.

    items: 128-row parts of blocks times key heads, dealt out to any number of programs.
    """
    # 1. shared memory: rows of both consumers, the stages, ones that sum the weights
    HEAD: gl.constexpr = SHAPE.HEAD
    LAYOUT: gl.constexpr = k_tiles.layout
    dtype: gl.constexpr = operands.q.dtype.element_ty
    q_rows = gl.allocate_shared_memory(dtype, [CONSUMERS, CONSUMER_ROWS, HEAD], LAYOUT)
    k = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD], LAYOUT)
    v = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD], LAYOUT)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ONES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one = gl.full((MASSES, TILE), 1.0, dtype, layout=FLAT)
    ones = gl.allocate_shared_memory(dtype, [MASSES, TILE], ONES, one)
    # 2. barriers: K and V of a stage are waited for apart and released together
    k_full = allocate_barriers(STAGES)
    v_full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((k_full, v_full), (free,))
    # 3. two consumers and their producer
    pipeline = Pipeline(k, v, k_full, v_full, free)
    ones_t = ones.permute((1, 0))
    run_warps(
        _consume,
        pipeline,
        q_rows,
        (operands, ones_t, blocks, rows, items, window, SHAPE, BLOCK),
        CONSUMER_REGISTERS,
        _produce,
        (k_tiles, v_tiles, pipeline, blocks, rows, tables, items, widest, window, SHAPE, BLOCK),
        PRODUCER_REGISTERS,
    )
