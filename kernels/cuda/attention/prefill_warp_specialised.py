"""Warp-specialised prefill attention: one producer warp, two consumer warpgroups.

The arithmetic is that of `split.py`, tile for tile. A program takes items of 128 rows of one
key head, 64 for each group of warps, and both read the tiles that the fetching warp brings, which
goes on to the next item while they end this one. Within a group the scores of tile j + 1 are asked
for before the products p . v of tile j, and its exponentials are taken while those run (Shah et al.
2024, FlashAttention-3, arXiv 2407.08608, algorithm 2); the groups drift apart, so that one's
exponentials hide behind the other's products.

Hopper only, heads of 128 at most: two fp32 states of a row must fit a thread's registers.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

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
    GROUP_ROWS,
    MASSES,
    add,
    ask,
    shrink_sums,
    weigh,
    whole_split,
)
from tpdet.kernels.cuda.launch.warp_pipeline import copy_tile, release

PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


@gluon.jit
def _fetch(
    k_tiles,
    v_tiles,
    k_ring,
    v_ring,
    k_full,
    v_full,
    free,
    blocks,
    rows,
    tables,
    items,
    widest,
    window,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The fetching warp: every item's tiles, one after another, into rings of STAGES places."""
    fetched = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        sequence, head, _row, _first, _at, _count, _start, begin, _rest, _whole, end = item_of(
            turn, items, blocks, rows, window, KEY_HEADS, GROUP, WINDOW, BLOCK
        )
        table = tables + sequence * widest
        for tile in range(begin, end):
            place = fetched % STAGES
            split = tile // TILES
            at = (gl.load(table + split) * KEY_HEADS + head) * PAGE + (tile - split * TILES) * TILE
            mbarrier.wait(free.index(place), fetched // STAGES & 1 ^ 1)
            mbarrier.expect(k_full.index(place), k_tiles.block_type.nbytes)
            copy_tile(k_tiles, [at, 0], k_full.index(place), k_ring.index(place))
            mbarrier.expect(v_full.index(place), v_tiles.block_type.nbytes)
            copy_tile(v_tiles, [at, 0], v_full.index(place), v_ring.index(place))
            fetched += 1


@gluon.jit
def _mask(score, tile, whole, position, window, WINDOW: gl.constexpr, BY_KEY: gl.constexpr):
    """Scores; from tile `whole` on those of unseen keys fall below every other."""
    if tile >= whole:
        key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, BY_KEY))
        seen = sees(key[None, :], position[:, None], window, WINDOW)
        score = gl.where(seen, score, BEYOND)
    return score


@gluon.jit
def _load_rows(
    q, q_half, row, first, first_row, count, head, q_stride, GROUP: gl.constexpr, HEAD: gl.constexpr
):
    """The group's 64 query rows from `row` on to shared memory; rows past `count` are zeros."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row_F = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, FLAT))
    token = first + row_F // GROUP
    column = (head * GROUP + row_F % GROUP) * HEAD
    at = (first_row + token).to(gl.int64) * q_stride + column
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, FLAT))
    live = (token < count)[:, None]
    q_half.store(gl.load(q + at[:, None] + lane[None, :], mask=live, other=0.0))
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
    q_half,
    k_ring,
    v_ring,
    ones,
    k_full,
    v_full,
    free,
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
    STAGES: gl.constexpr,
):
    """Mass and total of 64 rows over an item's tiles, before which the program took `taken`."""
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, BY_KEY)
    BY_LANE: gl.constexpr = gl.SliceLayout(1, WIDE)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    MASS_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    dtype: gl.constexpr = k_ring.dtype
    largest = gl.full((GROUP_ROWS,), UNSEEN, gl.float32, layout=BY_LANE)
    mass = gl.zeros((GROUP_ROWS,), gl.float32, layout=BY_LANE)
    total = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
    for split in range(0, (rest - begin) // TILES):
        m, w, o = whole_split(
            q_half,
            k_ring,
            v_ring,
            ones,
            k_full,
            v_full,
            free,
            taken + split * TILES,
            scale,
            HEAD,
            STAGES,
        )
        seen = gl.full((GROUP_ROWS,), True, gl.int1, layout=BY_LANE)
        largest, mass, total = _merge_into(largest, mass, total, m, w, o, seen, BY_LANE)

    m = gl.full((GROUP_ROWS,), UNSEEN, gl.float32, layout=BY_SCORE)
    w = gl.zeros((GROUP_ROWS, MASSES), gl.float32, layout=NARROW)
    o = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
    before = taken + rest - begin
    score = ask(q_half, k_ring, k_full, before, STAGES)
    score = warpgroup_mma_wait(0, deps=(score,))
    score = _mask(score, rest, whole, position, window, WINDOW, BY_KEY)
    m, shrink, weight = weigh(score, scale, m, dtype, WEIGHT)
    for tile in range(rest + 1, end):
        scores = ask(q_half, k_ring, k_full, before + 1, STAGES)
        sums, masses = add(weight, v_ring, ones, v_full, before, o, w, STAGES, MASS_WEIGHT)
        score = warpgroup_mma_wait(2, deps=(scores,))
        fresh = tile % TILES == 0
        score = _mask(score, tile, whole, position, window, WINDOW, BY_KEY)
        ended = m
        earlier = gl.where(fresh, UNSEEN, m)
        m, shrink, next_weight = weigh(score, scale, earlier, dtype, WEIGHT)
        o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
        release(free.index(before % STAGES))
        if fresh:
            seen = _visible(tile // TILES - 1, position, window, WINDOW, BY_LANE)
            largest, mass, total = _merge_into(largest, mass, total, ended, w, o, seen, BY_LANE)
            o = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
            w = gl.zeros((GROUP_ROWS, MASSES), gl.float32, layout=NARROW)
        else:
            o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
        weight = next_weight
        before += 1

    values = v_ring.index(before % STAGES)
    if end * TILE > start + count:
        # What follows the last key may be NaN, and 0 * NaN is NaN. Both groups write zeros there.
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        key = (end - 1) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, FLAT))
        clean = values.load(FLAT)
        values.store(gl.where((key < start + count)[:, None], clean, 0.0))
        fence_async_shared()
        tl.debug_barrier()
    sums, masses = add(weight, v_ring, ones, v_full, before, o, w, STAGES, MASS_WEIGHT)
    o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
    release(free.index(before % STAGES))
    seen = _visible((end - 1) // TILES, position, window, WINDOW, BY_LANE)
    largest, mass, total = _merge_into(largest, mass, total, m, w, o, seen, BY_LANE)
    return mass, total


@gluon.jit
def _consume(
    q,
    q_half,
    k_ring,
    v_ring,
    ones,
    k_full,
    v_full,
    free,
    out,
    blocks,
    rows,
    half,
    items,
    q_stride,
    window,
    scale,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of four warps: 64 rows of every item; writes their results."""
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    BY_LANE: gl.constexpr = gl.SliceLayout(1, WIDE)
    taken = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        _, head, row, first, first_row, count, start, begin, rest, whole, end = item_of(
            turn, items, blocks, rows, window, KEY_HEADS, GROUP, WINDOW, BLOCK
        )
        if end > 0:
            row += half * GROUP_ROWS
            _load_rows(q, q_half, row, first, first_row, count, head, q_stride, GROUP, HEAD)
            row_S = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, BY_KEY))
            position = start + first + row_S // GROUP
            mass, total = _attend(
                q_half,
                k_ring,
                v_ring,
                ones,
                k_full,
                v_full,
                free,
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
                HEAD,
                WINDOW,
                STAGES,
            )
            taken += end - begin
            row_L = row + gl.arange(0, GROUP_ROWS, layout=BY_LANE)
            token = first + row_L // GROUP
            live = token < count
            result = row_result(mass, total, live)
            to = (first_row + token).to(gl.int64) * (KEY_HEADS * GROUP * HEAD)
            column = (head * GROUP + row_L % GROUP) * HEAD
            lane = gl.arange(0, HEAD, layout=gl.SliceLayout(0, WIDE))
            out_at = out + (to + column)[:, None] + lane[None, :]
            gl.store(out_at, result.to(out.dtype.element_ty), mask=live[:, None])


@gluon.jit(do_not_specialize=["items", "widest", "window"])
def attend_groups(
    q,
    k_tiles,
    v_tiles,
    out,
    blocks,
    rows,
    tables,
    items,
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
    """`attend_blocks`, whose docstring has the shapes, of 128 rows an item; num_warps=4.

    items: 128-row parts of blocks times key heads, dealt out to any number of programs.
    """
    RING: gl.constexpr = k_tiles.layout
    q_ring = gl.allocate_shared_memory(q.dtype.element_ty, [2, GROUP_ROWS, HEAD], RING)
    k_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, HEAD], RING)
    v_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, HEAD], RING)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ONES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    one = gl.full((MASSES, TILE), 1.0, q.dtype.element_ty, layout=FLAT)
    ones = gl.allocate_shared_memory(q.dtype.element_ty, [MASSES, TILE], ONES, one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(k_full.index(place), count=1)
        mbarrier.init(v_full.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    ones_t = ones.permute((1, 0))
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q,
                    q_ring.index(0),
                    k_ring,
                    v_ring,
                    ones_t,
                    k_full,
                    v_full,
                    free,
                    out,
                    blocks,
                    rows,
                    0,
                    items,
                    q_stride,
                    window,
                    scale,
                    KEY_HEADS,
                    GROUP,
                    HEAD,
                    WINDOW,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    q,
                    q_ring.index(1),
                    k_ring,
                    v_ring,
                    ones_t,
                    k_full,
                    v_full,
                    free,
                    out,
                    blocks,
                    rows,
                    1,
                    items,
                    q_stride,
                    window,
                    scale,
                    KEY_HEADS,
                    GROUP,
                    HEAD,
                    WINDOW,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _fetch,
                (
                    k_tiles,
                    v_tiles,
                    k_ring,
                    v_ring,
                    k_full,
                    v_full,
                    free,
                    blocks,
                    rows,
                    tables,
                    items,
                    widest,
                    window,
                    KEY_HEADS,
                    GROUP,
                    WINDOW,
                    BLOCK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
