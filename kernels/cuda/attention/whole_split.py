"""What a consumer of prefill attention does with the tiles of K and V that its producer brings.

    R       64 rows of the consumer: a token and a query head each
    D       lanes of a head
    q       [R, D] and, in a stage, K and V [64, D]: 2-byte values in shared memory
    score   [R, 64] fp32; m, shrink [R], w (mass) [R, 8] and o (weighted values) [R, D]: fp32

The arithmetic is that of `split.py`, tile for tile, in registers. A stage is free again once both
consumers have released it. Tiles are counted from the first one that the program's producer copies.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tpdet.kernels.cuda.attention.split import TILE, TILES, UNSEEN
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    accumulator_layout,
    release,
    slot_of,
    wait_full,
)

MASSES = gl.constexpr(8)  # the narrowest product there is
OPERAND_WIDTH = gl.constexpr(2)  # 2-byte values of an operand that a register holds


class Pipeline(NamedTuple):
    """What the producer fills and the consumers read: K and V of a tile arrive apart."""

    k: Any  # [STAGES, 64, D]
    v: Any  # [STAGES, 64, D]
    k_full: Any
    v_full: Any
    free: Any


@gluon.jit
def tile_weights(score, scale, largest, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Raised maximum [R], factor of the state so far [R], rounded weights as an operand."""
    raised = gl.maximum(largest, gl.max(score, 1) * scale)
    shrink = gl.exp2(largest - raised)
    weight = gl.exp2(gl.fma(score, scale, -raised[:, None])).to(dtype)
    return raised, shrink, gl.convert_layout(weight, OPERAND)


@gluon.jit
def begin_scores(q, pipeline, tile):
    """Begin the scores of a tile once its keys are there; they are to be waited for."""
    empty = gl.zeros((CONSUMER_ROWS, TILE), gl.float32, layout=accumulator_layout(TILE))
    slot = slot_of(pipeline.k_full, tile)
    wait_full(pipeline.k_full, tile)
    keys = pipeline.k.index(slot).permute((1, 0))
    return warpgroup_mma(q, keys, empty, use_acc=False, is_async=True)


@gluon.jit
def begin_sums(weight, pipeline, ones, tile, o, w, NARROW: gl.constexpr):
    """Begin to add weights times a tile's values onto o, and times ones onto w, likewise."""
    wait_full(pipeline.v_full, tile)
    values = pipeline.v.index(slot_of(pipeline.v_full, tile))
    sums = warpgroup_mma(weight, values, o, is_async=True)
    masses = warpgroup_mma(gl.convert_layout(weight, NARROW), ones, w, is_async=True)
    return sums, masses


@gluon.jit
def shrink_sums(o, w, factor, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """A state's sums times the factor of its rows."""
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, WIDE))[:, None]
    return o, w * gl.convert_layout(factor, gl.SliceLayout(1, NARROW))[:, None]


@gluon.jit
def whole_split(q, pipeline, ones, first, scale, HEAD: gl.constexpr):
    """The state of a split of which every row sees every key; `first` is its first tile.

    Straight code, as the assembler lets products run on over no branch back: the scores of tile
    j + 1 begin before the sums of tile j - 1 shrink and take the products of tile j.
    """
    BY_KEY: gl.constexpr = accumulator_layout(TILE)
    WIDE: gl.constexpr = accumulator_layout(HEAD)
    NARROW: gl.constexpr = accumulator_layout(MASSES)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, WIDE, OPERAND_WIDTH)
    MASS_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, NARROW, OPERAND_WIDTH)
    dtype: gl.constexpr = pipeline.k.dtype
    m = gl.full((CONSUMER_ROWS,), UNSEEN, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    o = gl.zeros((CONSUMER_ROWS, HEAD), gl.float32, layout=WIDE)
    w = gl.zeros((CONSUMER_ROWS, MASSES), gl.float32, layout=NARROW)
    # 1. scores and weights of tile 0
    score = begin_scores(q, pipeline, first)
    score = warpgroup_mma_wait(0, deps=(score,))
    m, shrink, weight = tile_weights(score, scale, m, dtype, WEIGHT)
    sums, masses, taken = o, w, weight
    for step in gl.static_range(1, TILES):
        tile = first + step
        # 2. begin the scores of tile `step`
        scores = begin_scores(q, pipeline, tile)
        # 3. the sums of tile step - 2 end; its slot is free
        if step > 1:
            o, w, taken = warpgroup_mma_wait(1, deps=(sums, masses, taken))
            release(pipeline.free, tile - 2)
            o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
        # 4. begin the sums of tile step - 1
        sums, masses = begin_sums(weight, pipeline, ones, tile - 1, o, w, MASS_WEIGHT)
        taken = weight
        # 5. weights of tile `step`, while those sums run
        score = warpgroup_mma_wait(2, deps=(scores,))
        m, shrink, weight = tile_weights(score, scale, m, dtype, WEIGHT)
    # 6. the sums of the last two tiles
    last = first + TILES - 1
    o, w, taken = warpgroup_mma_wait(0, deps=(sums, masses, taken))
    release(pipeline.free, last - 1)
    o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
    sums, masses = begin_sums(weight, pipeline, ones, last, o, w, MASS_WEIGHT)
    o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
    release(pipeline.free, last)
    return m, w, o
