"""Attention of many rows with warps of three trades: one fetches, two groups of four compute.

The arithmetic is that of `attention_split`, tile for tile. A program has 128 rows of one key head,
64 for each group of warps, and both read the tiles that the fetching warp brings. Within a group
the scores of tile j + 1 are asked for before the products p . v of tile j, and its exponentials are
taken while those run (Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, algorithm 2); the
groups drift apart, so that one's exponentials hide behind the other's products.

Hopper only, heads of 128 at most: two fp32 states of a row must fit a thread's registers.
"""

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

from tpdet.kernels.cuda.attention_split import (
    PAGE,
    TILE,
    TILES,
    UNSEEN,
    merge,
    row_result,
    sees,
    sees_split,
)

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6
GROUP_ROWS = gl.constexpr(64)  # of a group of four warps: the height of their instructions
MASSES = gl.constexpr(8)  # the narrowest product there is
BEYOND = gl.constexpr(-2e30)  # below UNSEEN: exp2 of the difference is 0, a row without keys too
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


@gluon.jit
def _fetch(k_tiles, v_tiles, k_ring, v_ring, k_full, v_full, k_free, v_free,
           table, head, begin, end, KEY_HEADS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The fetching warp: tiles [begin, end) into rings of STAGES places."""
    for tile in range(begin, end):
        place = (tile - begin) % STAGES
        turn = (tile - begin) // STAGES & 1
        split = tile // TILES
        at = (gl.load(table + split) * KEY_HEADS + head) * PAGE + (tile - split * TILES) * TILE
        mbarrier.wait(k_free.index(place), turn ^ 1)
        mbarrier.expect(k_full.index(place), k_tiles.block_type.nbytes)
        copy_tile(k_tiles, [at, 0], k_full.index(place), k_ring.index(place))
        mbarrier.wait(v_free.index(place), turn ^ 1)
        mbarrier.expect(v_full.index(place), v_tiles.block_type.nbytes)
        copy_tile(v_tiles, [at, 0], v_full.index(place), v_ring.index(place))


@gluon.jit
def _release(free):
    """Every warp of the group is done with a place of a ring: only then does one thread say so."""
    tl.debug_barrier()
    mbarrier.arrive(free, count=1)


@gluon.jit
def _mask(score, tile, whole, position, window, WINDOW: gl.constexpr, BY_KEY: gl.constexpr):
    """Scaled scores; from tile `whole` on those of unseen keys fall below every other."""
    if tile >= whole:
        key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, BY_KEY))
        seen = sees(key[None, :], position[:, None], window, WINDOW)
        score = gl.where(seen, score, BEYOND)
    return score


@gluon.jit
def _weigh(score, largest, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Raised maximum [R], factor of the state so far [R], rounded weights as an operand."""
    raised = gl.maximum(largest, gl.max(score, 1))
    shrink = gl.exp2(largest - raised)
    weight = gl.exp2(score - raised[:, None]).to(dtype)
    return raised, shrink, gl.convert_layout(weight, OPERAND)


@gluon.jit
def _merge_into(largest, mass, total, m, w, o, split, position, window, WINDOW: gl.constexpr,
                BY_LANE: gl.constexpr):  # fmt: skip
    """A finished split onto the row state, whose vectors are laid out by lane."""
    visible = gl.convert_layout(sees_split(split, position, window, WINDOW), BY_LANE)
    other = gl.convert_layout(m, BY_LANE)
    return merge(largest, mass, total, visible, other, gl.convert_layout(gl.max(w, 1), BY_LANE), o)


@gluon.jit
def _consume(q_half, k_ring, v_ring, ones, k_full, v_full, k_free, v_free, out, half,
             first, part, first_row, count, start, head, begin, whole, end, window, scale,
             KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
             WINDOW: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """64 rows over tiles [begin, end): unmasked below tile `whole`; writes their results."""
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, BY_KEY)
    BY_LANE: gl.constexpr = gl.SliceLayout(1, WIDE)
    BY_MASS: gl.constexpr = gl.SliceLayout(1, NARROW)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    MASS_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    dtype: gl.constexpr = k_ring.dtype
    row = part * (2 * GROUP_ROWS) + half * GROUP_ROWS
    row_S = row + gl.arange(0, GROUP_ROWS, layout=BY_SCORE)
    position = start + first + row_S // GROUP
    largest = gl.full((GROUP_ROWS,), UNSEEN, gl.float32, layout=BY_LANE)
    mass = gl.zeros((GROUP_ROWS,), gl.float32, layout=BY_LANE)
    total = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
    m = gl.full((GROUP_ROWS,), UNSEEN, gl.float32, layout=BY_SCORE)
    w = gl.zeros((GROUP_ROWS, MASSES), gl.float32, layout=NARROW)
    o = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
    empty = gl.zeros((GROUP_ROWS, TILE), gl.float32, layout=BY_KEY)

    mbarrier.wait(k_full.index(0), 0)
    score = warpgroup_mma(q_half, k_ring.index(0).permute((1, 0)), empty, use_acc=False,
                          is_async=True)  # fmt: skip
    score = warpgroup_mma_wait(0, deps=(score,))
    _release(k_free.index(0))
    score = _mask(score * scale, begin, whole, position, window, WINDOW, BY_KEY)
    m, shrink, weight = _weigh(score, m, dtype, WEIGHT)
    for tile in range(begin + 1, end):
        place = (tile - begin) % STAGES
        before = (tile - begin - 1) % STAGES
        mbarrier.wait(k_full.index(place), (tile - begin) // STAGES & 1)
        scores = warpgroup_mma(q_half, k_ring.index(place).permute((1, 0)), empty, use_acc=False,
                               is_async=True)  # fmt: skip
        mbarrier.wait(v_full.index(before), (tile - begin - 1) // STAGES & 1)
        sums = warpgroup_mma(weight, v_ring.index(before), o, is_async=True)
        masses = warpgroup_mma(gl.convert_layout(weight, MASS_WEIGHT), ones, w, is_async=True)
        score = warpgroup_mma_wait(2, deps=(scores,))
        _release(k_free.index(place))
        fresh = tile % TILES == 0
        score = _mask(score * scale, tile, whole, position, window, WINDOW, BY_KEY)
        ended = m
        m, shrink, next_weight = _weigh(score, gl.where(fresh, UNSEEN, m), dtype, WEIGHT)
        o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
        _release(v_free.index(before))
        if fresh:
            largest, mass, total = _merge_into(
                largest, mass, total, ended, w, o, tile // TILES - 1,
                position, window, WINDOW, BY_LANE,
            )  # fmt: skip
            o = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
            w = gl.zeros((GROUP_ROWS, MASSES), gl.float32, layout=NARROW)
        o = o * gl.convert_layout(shrink, BY_LANE)[:, None]
        w = w * gl.convert_layout(shrink, BY_MASS)[:, None]
        weight = next_weight

    last = (end - begin - 1) % STAGES
    values = v_ring.index(last)
    mbarrier.wait(v_full.index(last), (end - begin - 1) // STAGES & 1)
    if end * TILE > start + count:
        # What follows the last key may be NaN, and 0 * NaN is NaN. Both groups write zeros there.
        FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        key = (end - 1) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, FLAT))
        clean = values.load(FLAT)
        values.store(gl.where((key < start + count)[:, None], clean, 0.0))
        fence_async_shared()
        tl.debug_barrier()
    o = warpgroup_mma(weight, values, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    w = warpgroup_mma(gl.convert_layout(weight, MASS_WEIGHT), ones, w, is_async=True)
    w = warpgroup_mma_wait(0, deps=(w,))
    largest, mass, total = _merge_into(largest, mass, total, m, w, o, (end - 1) // TILES,
                                       position, window, WINDOW, BY_LANE)  # fmt: skip

    row_L = row + gl.arange(0, GROUP_ROWS, layout=BY_LANE)
    token = first + row_L // GROUP
    live = token < count
    result = row_result(mass, total, live)
    to = (first_row + token).to(gl.int64) * (KEY_HEADS * GROUP * HEAD)
    column = (head * GROUP + row_L % GROUP) * HEAD
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, WIDE))
    out_at = out + (to + column)[:, None] + lane[None, :]
    gl.store(out_at, result.to(out.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _load_rows(q, q_ring, half, first, part, first_row, count, head, q_stride,
               GROUP: gl.constexpr, HEAD: gl.constexpr):  # fmt: skip
    """The 64 query rows of a group of warps to shared memory; rows past `count` are zeros."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = part * (2 * GROUP_ROWS) + half * GROUP_ROWS
    row_F = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, FLAT))
    token = first + row_F // GROUP
    column = (head * GROUP + row_F % GROUP) * HEAD
    at = (first_row + token).to(gl.int64) * q_stride + column
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, FLAT))
    live = (token < count)[:, None]
    q_ring.index(half).store(gl.load(q + at[:, None] + lane[None, :], mask=live, other=0.0))


@gluon.jit(do_not_specialize=["widest", "window"])
def attend_groups(
    q,
    k_tiles,
    v_tiles,
    out,
    blocks,
    rows,
    tables,
    q_stride,
    widest,
    window,
    scale,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`attend_blocks` of 128 rows a program; its docstring has the shapes. num_warps=4."""
    PARTS: gl.constexpr = BLOCK * GROUP // (2 * GROUP_ROWS)
    head = gl.program_id(0) % KEY_HEADS
    work = gl.program_id(0) // KEY_HEADS
    part = PARTS - 1 - work % PARTS
    sequence = gl.load(blocks + work // PARTS * 2)
    first = gl.load(blocks + work // PARTS * 2 + 1)
    first_row = gl.load(rows + sequence * 3)
    count = gl.load(rows + sequence * 3 + 1)
    start = gl.load(rows + sequence * 3 + 2)
    low = first + part * (2 * GROUP_ROWS) // GROUP
    if low < count:
        high = gl.minimum(
            first + (part * (2 * GROUP_ROWS) + 2 * GROUP_ROWS - 1) // GROUP, count - 1
        )
        end = (start + high) // TILE + 1
        begin = 0
        whole = (start + low + 1) // TILE
        if WINDOW:
            begin = gl.maximum(start + low - window + 1, 0) // TILE
            whole = begin
        table = tables + sequence * widest
        RING: gl.constexpr = k_tiles.layout
        q_ring = gl.allocate_shared_memory(q.dtype.element_ty, [2, GROUP_ROWS, HEAD], RING)
        k_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, HEAD], RING)
        v_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, HEAD], RING)
        FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ONES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        one = gl.full((MASSES, TILE), 1.0, q.dtype.element_ty, layout=FLAT)
        ones = gl.allocate_shared_memory(q.dtype.element_ty, [MASSES, TILE], ONES, one)
        _load_rows(q, q_ring, 0, first, part, first_row, count, head, q_stride, GROUP, HEAD)
        _load_rows(q, q_ring, 1, first, part, first_row, count, head, q_stride, GROUP, HEAD)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(k_full.index(place), count=1)
            mbarrier.init(v_full.index(place), count=1)
            mbarrier.init(k_free.index(place), count=2)
            mbarrier.init(v_free.index(place), count=2)
        fence_async_shared()
        ones_t = ones.permute((1, 0))
        gl.warp_specialize(
            [
                (_consume, (q_ring.index(0), k_ring, v_ring, ones_t, k_full, v_full, k_free, v_free,
                            out, 0, first, part, first_row, count, start, head, begin, whole, end,
                            window, scale, KEY_HEADS, GROUP, HEAD, WINDOW, STAGES)),
                (_consume, (q_ring.index(1), k_ring, v_ring, ones_t, k_full, v_full, k_free, v_free,
                            out, 1, first, part, first_row, count, start, head, begin, whole, end,
                            window, scale, KEY_HEADS, GROUP, HEAD, WINDOW, STAGES)),
                (_fetch, (k_tiles, v_tiles, k_ring, v_ring, k_full, v_full, k_free, v_free,
                          table, head, begin, end, KEY_HEADS, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
