"""The state of a split of pages in fp8, by four warps that make numbers of codes (Hopper).

Names and arithmetic are those of `streamed_split.py`. Codes become operands in registers
(`fp8_tiles.py`), values while the scores of the same tile are on their way.
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
    weight_factors,
)
from tpdet.kernels.cuda.attention.split import PAGE, TILE, UNSEEN
from tpdet.kernels.cuda.attention.streamed_split import seen_scores, swapped_layout
from tpdet.kernels.cuda.launch.warp_pipeline import release, slot_of, wait_full


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
def coded_split(rows, pipeline, step, split, tiles):
    """`streamed_split` over codes."""
    ROWS: gl.constexpr = rows.query.shape[0]
    HEAD: gl.constexpr = rows.query.shape[1]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    m = gl.full((ROWS,), UNSEEN, gl.float32, layout=gl.SliceLayout(0, SCORE))
    w = gl.zeros((TILE, ROWS), gl.float32, layout=SCORE)
    o = gl.zeros((HEAD, ROWS), gl.float32, layout=SCORE)
    weight = rows.weights.slice(0, ROWS).permute((1, 0))
    scaled = rows.weights.slice(ROWS, ROWS).permute((1, 0))
    for tile in range(0, tiles):
        current = step + tile
        exponents = pipeline.exponents.index(slot_of(pipeline.k_free, current))
        # 1. scores, while codes of values become numbers
        score = _begin_scores(rows, pipeline, current)
        wait_full(pipeline.v_full, current)
        values = value_numbers(pipeline.v.index(slot_of(pipeline.v_full, current)), OPERAND)
        score = warpgroup_mma_wait(0, deps=(score,))
        score = (score * rows.lack[None, :]) * score_factors(exponents, BY_KEY)[:, None]
        score = seen_scores(score, rows, split * PAGE + tile * TILE)
        # 2. weights, to shared memory
        raised = gl.maximum(m, gl.max(score, 0) * rows.scale)
        shrink = gl.exp2(m - raised)
        m = raised
        fresh = gl.exp2(gl.fma(score, rows.scale, -raised[None, :]))
        both = _both_weights(fresh, weight_factors(exponents, BY_KEY), ROWS)
        rows.weights.permute((1, 0)).store(both)
        fence_async_shared()
        tl.debug_barrier()  # behind it no warp reads the keys
        mbarrier.arrive(pipeline.k_free.index(slot_of(pipeline.k_free, current)), count=1)
        # 3. sums
        sums = warpgroup_mma(values, scaled, o * shrink[None, :], is_async=True)
        masses = warpgroup_mma(rows.ones, weight, w * shrink[None, :], is_async=True)
        w, o = warpgroup_mma_wait(0, deps=(masses, sums))
        release(pipeline.v_free, current)
    return m, gl.max(w, 0), o
