"""The state of a split whose tiles a warp copies to shared memory, by four warps (Hopper).

    R       rows of an item: a token and a query head of the group each, 8 or 16
    D       lanes of a head
    query [R, D], weights [2, R, 64] and, in a stage, K and V [64, D]: 2-byte values, shared memory
    score [64, R], m, shrink [R], w (mass) [64, R] and o (weighted values) [D, R]: fp32, registers

The arithmetic is that of `split.py`, tile for tile, every product the other way round: keys and
lanes fill the side of 64 that the wide matrix instruction has. The scores and weights of a tile are
taken while the sums of the tile before run. Tiles are counted from the program's first one.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.attention.split import (
    BEYOND,
    PAGE,
    TILE,
    UNSEEN,
    merge_factors,
    sees,
)
from tpdet.kernels.cuda.launch.warp_pipeline import release, slot_of, wait_full


class StreamedTiles(NamedTuple):
    """What is copied, and is free again, apart: K and V of a tile, [STAGES, 64, D].

    In fp8 k and v are int16 [STAGES, 64, D / 2], and exponents [STAGES, 4, 64] arrive with K.
    """

    k: Any
    v: Any
    exponents: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class StreamedRows(NamedTuple):
    """Rows of an item: q and weights in shared memory, ones; `start`: the first one's position.

    weights: of two tiles, in fp8 then those that are scaled; lack: of scores (`raised_query`);
    exchange: in fp8 fp32 [4, R], shared memory.
    """

    query: Any
    lack: Any
    weights: Any
    exchange: Any
    ones: Any
    position: Any
    start: Any
    length: Any
    scale: Any


@gluon.constexpr_function
def number_layout():
    """The layout of 2-byte values in shared memory: swizzled lines of 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def swapped_layout(rows):
    """The layout of a product [keys or lanes, rows] in registers."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16]
    )


@gluon.jit
def merge_swapped(largest, mass, total, visible, m, w, o):
    """`split.merge` of totals [D, R]: the later state (m, w [R], o) where `visible` [R]."""
    raised, a, b = merge_factors(largest, m)
    merged_mass = mass * a + w * b
    merged_total = total * a[None, :] + o * b[None, :]
    largest = gl.where(visible, raised, largest)
    mass = gl.where(visible, merged_mass, mass)
    total = gl.where(visible[None, :], merged_total, total)
    return largest, mass, total


@gluon.jit
def _begin_scores(rows, pipeline, step):
    """Begin the scores of a tile once its keys are there; they are to be waited for."""
    ROWS: gl.constexpr = rows.query.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    empty = gl.zeros((TILE, ROWS), gl.float32, layout=SCORE)
    wait_full(pipeline.k_full, step)
    keys = pipeline.k.index(slot_of(pipeline.k_full, step))
    return warpgroup_mma(keys, rows.query.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def seen_scores(score, rows, first_key):
    """Scores of a tile, of which those of keys that no row sees lie below all others."""
    if first_key + TILE > rows.start + 1:
        SCORE: gl.constexpr = swapped_layout(rows.query.shape[0])
        key = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORE))
        seen = sees(key[:, None], rows.position[None, :], 0, False)
        score = gl.where(seen, score, BEYOND)
    return score


@gluon.jit
def _take_weights(score, rows, pipeline, step, tile, first_key, m):
    """A tile's weights, rounded, to shared memory; the raised maximum, and the state's factor."""
    score = seen_scores(score, rows, first_key)
    raised = gl.maximum(m, gl.max(score, 0) * rows.scale)
    weight = gl.exp2(gl.fma(score, rows.scale, -raised[None, :]))
    rows.weights.index(tile % 2).permute((1, 0)).store(weight.to(rows.weights.dtype))
    fence_async_shared()
    tl.debug_barrier()  # behind it no warp reads the keys
    mbarrier.arrive(pipeline.k_free.index(slot_of(pipeline.k_free, step)), count=1)
    return raised, gl.exp2(m - raised)


@gluon.jit
def _begin_sums(rows, pipeline, step, tile, shrink, w, o):
    """Begin to add a tile's weights times its values onto o, and times ones onto w, shrunk."""
    wait_full(pipeline.v_full, step)
    values = pipeline.v.index(slot_of(pipeline.v_full, step))
    weight = rows.weights.index(tile % 2).permute((1, 0))
    sums = warpgroup_mma(values.permute((1, 0)), weight, o * shrink[None, :], is_async=True)
    masses = warpgroup_mma(rows.ones, weight, w * shrink[None, :], is_async=True)
    return masses, sums


@gluon.jit
def _clean_values(pipeline, step, first_key, length, BOX: gl.constexpr):
    """Write zeros over a last tile's values behind the last key: they may be NaN, and so 0 * NaN.

    Whole boxes behind it were copied as zeros.
    """
    if (first_key + TILE > length) & (length % BOX != 0):
        wait_full(pipeline.v_full, step)
        values = pipeline.v.index(slot_of(pipeline.v_full, step))
        FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        key = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, FLAT))
        values.store(gl.where((key < length)[:, None], values.load(FLAT), 0.0))
        fence_async_shared()
        tl.debug_barrier()


@gluon.jit
def streamed_split(rows, pipeline, step, split, tiles, BOX: gl.constexpr):
    """The state of a split's `tiles` tiles, of which the first is `step`: m, w [R] and o [D, R]."""
    ROWS: gl.constexpr = rows.query.shape[0]
    HEAD: gl.constexpr = rows.query.shape[1]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    m = gl.full((ROWS,), UNSEEN, gl.float32, layout=gl.SliceLayout(0, SCORE))
    w = gl.zeros((TILE, ROWS), gl.float32, layout=SCORE)
    o = gl.zeros((HEAD, ROWS), gl.float32, layout=SCORE)
    # 1. weights of the first tile
    score = _begin_scores(rows, pipeline, step)
    score = warpgroup_mma_wait(0, deps=(score,))
    m, shrink = _take_weights(score, rows, pipeline, step, 0, split * PAGE, m)
    for tile in range(1, tiles):
        # 2. begin this tile's scores and the sums of the tile before
        current = step + tile
        scores = _begin_scores(rows, pipeline, current)
        masses, sums = _begin_sums(rows, pipeline, current - 1, tile - 1, shrink, w, o)
        # 3. weights of this tile, while those sums run
        score = warpgroup_mma_wait(2, deps=(scores,))
        first_key = split * PAGE + tile * TILE
        m, shrink = _take_weights(score, rows, pipeline, current, tile, first_key, m)
        # 4. the sums of the tile before end
        w, o = warpgroup_mma_wait(0, deps=(masses, sums))
        release(pipeline.v_free, current - 1)
    # 5. the last tile's sums
    last = step + tiles - 1
    _clean_values(pipeline, last, split * PAGE + (tiles - 1) * TILE, rows.length, BOX)
    masses, sums = _begin_sums(rows, pipeline, last, tiles - 1, shrink, w, o)
    w, o = warpgroup_mma_wait(0, deps=(masses, sums))
    release(pipeline.v_free, last)
    return m, gl.max(w, 0), o
