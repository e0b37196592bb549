"""The state of a split of pages in fp8, by four warps that make numbers of codes (Hopper).

Names and arithmetic are those of `streamed_split.py`. Codes become operands in registers
(`fp8_tiles.py`), values of a tile while the scores of the next one are on their way.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.attention.fp8_tiles import (
    key_numbers,
    score_factors,
    swapped_registers,
    value_numbers,
    warp_maxima_layout,
    weight_factors,
)
from tpdet.kernels.cuda.attention.split import PAGE, TILE, UNSEEN
from tpdet.kernels.cuda.attention.streamed_split import seen_scores, swapped_layout
from tpdet.kernels.cuda.launch.warp_pipeline import slot_of, wait_full

LATER = gl.constexpr(2)  # steps after which a tile is released: both its products have ended


@gluon.jit
def _tile_maxima(score, exchange):
    """The largest score of each row [R] of a tile [64, R]; behind it warps have met once."""
    ROWS: gl.constexpr = score.shape[1]
    TOGETHER: gl.constexpr = warp_maxima_layout(ROWS)
    by_warp = gl.max(score.reshape([4, TILE // 4, ROWS]), 1)
    exchange.store(by_warp)
    largest = gl.max(exchange.load(TOGETHER), 0)
    return gl.convert_layout(largest, gl.SliceLayout(0, swapped_layout(ROWS)), assert_trivial=True)


@gluon.jit
def _both_weights(weight, factor, ROWS: gl.constexpr):
    """Weights [64, R] fp32 rounded, and these times the factors of their values [64]: [64, 2R]."""
    LAYOUT: gl.constexpr = swapped_registers(ROWS)
    rounded = gl.convert_layout(weight.to(gl.bfloat16), LAYOUT, assert_trivial=True)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT)), 1)
    both = gl.join(rounded, rounded * factor)
    return both.permute([0, 2, 1]).reshape([TILE, 2 * ROWS])


@gluon.jit
def _begin_scores(rows, pipeline, step):
    """Begin a tile's scores by its codes, once they are there; they are to be waited for."""
    ROWS: gl.constexpr = rows.query.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    empty = gl.zeros((TILE, ROWS), gl.float32, layout=SCORE)
    wait_full(pipeline.k_full, step)
    codes = pipeline.k.index(slot_of(pipeline.k_full, step))
    keys = key_numbers(codes, gl.DotOperandLayout(0, SCORE, 2))
    return warpgroup_mma(keys, rows.query.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _take_weights(score, rows, pipeline, step, tile, first_key, m):
    """A tile's weights, to shared memory; the raised maximum, and the state's factor."""
    ROWS: gl.constexpr = rows.query.shape[0]
    BY_KEY: gl.constexpr = gl.SliceLayout(1, swapped_layout(ROWS))
    exponents = pipeline.exponents.index(slot_of(pipeline.k_free, step))
    score = (score * rows.lack[None, :]) * score_factors(exponents, BY_KEY)[:, None]
    score = seen_scores(score, rows, first_key)
    raised = gl.maximum(m, _tile_maxima(score, rows.exchange) * rows.scale)
    fresh = gl.exp2(gl.fma(score, rows.scale, -raised[None, :]))
    both = _both_weights(fresh, weight_factors(exponents, BY_KEY), ROWS)
    rows.weights.index(tile % 2).permute((1, 0)).store(both)
    fence_async_shared()
    tl.debug_barrier()  # behind it no warp reads the tile before the last one
    earlier = pipeline.k_free.index(slot_of(pipeline.k_free, step - LATER))
    mbarrier.arrive(earlier, count=1, pred=step >= LATER)
    return raised, gl.exp2(m - raised)


@gluon.jit
def _begin_sums(rows, pipeline, step, tile, shrink, w, o):
    """Begin to add a tile's weights times its values onto o, and times ones onto w, shrunk."""
    ROWS: gl.constexpr = rows.query.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, swapped_layout(ROWS), 2)
    wait_full(pipeline.v_full, step)
    values = value_numbers(pipeline.v.index(slot_of(pipeline.v_full, step)), OPERAND)
    weights = rows.weights.index(tile % 2)
    weight = weights.slice(0, ROWS).permute((1, 0))
    scaled = weights.slice(ROWS, ROWS).permute((1, 0))
    sums = warpgroup_mma(values, scaled, o * shrink[None, :], is_async=True)
    masses = warpgroup_mma(rows.ones, weight, w * shrink[None, :], is_async=True)
    return masses, sums


@gluon.jit
def coded_split(rows, pipeline, step, split, tiles):
    """`streamed_split` over codes."""
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
        # 2. begin this tile's scores, then the sums of the tile before by its numbers
        current = step + tile
        scores = _begin_scores(rows, pipeline, current)
        masses, sums = _begin_sums(rows, pipeline, current - 1, tile - 1, shrink, w, o)
        # 3. weights of this tile, while those sums run
        score = warpgroup_mma_wait(2, deps=(scores,))
        first_key = split * PAGE + tile * TILE
        m, shrink = _take_weights(score, rows, pipeline, current, tile, first_key, m)
        # 4. the sums of the tile before end
        w, o = warpgroup_mma_wait(0, deps=(masses, sums))
    # 5. the last tile's sums
    masses, sums = _begin_sums(rows, pipeline, step + tiles - 1, tiles - 1, shrink, w, o)
    w, o = warpgroup_mma_wait(0, deps=(masses, sums))
    return m, gl.max(w, 0), o
