"""Warp-specialised column products by tiles of 128 x 192: one producer warp, two consumers.

    column:  y[m, n] = round(sum over k of x[m, k] * w[n, k] + bias[n])
    gated:   y[m, i] = round(act(g[m, i]) * u[m, i])   g, u: columns, interleaved by eights

    M, N, K  rows of x, columns of y, depth: `steps` steps of DEPTH
    x_tiles [M, K], w_wide, w_rest [N, K], bias [N]: 2-byte values
    y_wide, y_rest [M, N], gated [M, N / 2]: 2-byte values

Between 128 and 512 rows the tiles of 128 and of 256 columns often leave a third of the
multiprocessors idle in the last round; 192 columns are the width between. The compiler knows powers
of two only, so a tile has two parts, of 128 and of 64 columns, each with an accumulator: two matrix
instructions a step. Each value is one fp32 chain from +0 in ascending K. Hopper only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from tpdet.kernels.cuda.gemm.variants.chain import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WIDE_ROWS,
    ChainPipeline,
    keep,
    send,
)
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.warp_specialised import (
    ChainSizes,
    add_bias,
    gate_tile,
    produce,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier, await_first
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    CONSUMERS,
    accumulator_layout,
    allocate_barriers,
    init_barriers,
    release,
    run_warps,
    slot_of,
    wait_full,
)

WIDE = gl.constexpr(128)
REST = gl.constexpr(64)
COLUMNS = gl.constexpr(WIDE.value + REST.value)


@gluon.jit
def _two_chains(pipeline, consumer, at, steps):
    """fp32 [CONSUMER_ROWS, WIDE] and [CONSUMER_ROWS, REST] of `steps` stages from step `at` on.

    A stage is released when the next step's products run.
    """
    BY_WIDE: gl.constexpr = accumulator_layout(WIDE)
    BY_REST: gl.constexpr = accumulator_layout(REST)
    wide = gl.zeros((CONSUMER_ROWS, WIDE), gl.float32, layout=BY_WIDE)
    rest = gl.zeros((CONSUMER_ROWS, REST), gl.float32, layout=BY_REST)
    for step in range(at, at + steps):
        slot = slot_of(pipeline.full, step)
        wait_full(pipeline.full, step)
        x = pipeline.wide.index(2 * slot + consumer)
        w = pipeline.narrow.index(slot).permute((1, 0))
        w_rest = pipeline.rest.index(slot).permute((1, 0))
        wide = warpgroup_mma(x, w, wide, is_async=True)
        rest = warpgroup_mma(x, w_rest, rest, is_async=True)
        wide, rest = warpgroup_mma_wait(2, deps=(wide, rest))
        if step > at:
            release(pipeline.free, step - 1)
    wide, rest = warpgroup_mma_wait(0, deps=(wide, rest))
    release(pipeline.free, at + steps - 1)
    return wide, rest


@gluon.jit
def _consume(consumer, pipeline, slot, rest_slots, y_wide, y_rest, bias, sizes, FORM: gl.constexpr):
    """A consumer warpgroup, 0 or 1: its 64 rows of all tiles of this program."""
    PAIR: gl.constexpr = 2 if FORM.GATED else 1
    m, n, _, steps = sizes
    rest_slot = rest_slots.index(consumer)
    blocks = gl.cdiv(m, WIDE_ROWS) * gl.cdiv(n, COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, column = tile_origin(tile, m, n, WIDE_ROWS, COLUMNS)
        row += consumer * CONSUMER_ROWS
        # 1. both chains, and what follows each
        wide, rest = _two_chains(pipeline, consumer, at, steps)
        at += steps
        if FORM.BIAS:
            wide = add_bias(wide, bias, column, n)
            rest = add_bias(rest, bias, column + WIDE, n)
        if FORM.GATED:
            wide = gate_tile(wide, FORM.GATED)
            rest = gate_tile(rest, FORM.GATED)
        # 2. each part leaves by the accelerator, while the next tile is computed
        keep(slot, wide, 1)
        send(slot, y_wide, [row, column // PAIR], True)
        keep(rest_slot, rest, 1)
        send(rest_slot, y_rest, [row, (column + WIDE) // PAIR], True)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "steps"])
def warp_specialised_parts(
    x_tiles,
    w_wide,
    w_rest,
    y_wide,
    y_rest,
    bias,
    m,
    n,
    steps,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [128, 192] of y [m, n], gated [m, n / 2]; K is `steps` steps of DEPTH.

    x_tiles: x in blocks [64, DEPTH]; w_wide, w_rest: the weight in blocks [128, DEPTH] and
    [64, DEPTH]; y_wide, y_rest: y in blocks [64, 128] and [64, 64], gated half as wide.
    FORM: a `WarpForm` of one leaf. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and two slots for each consumer's finished tile
    PAIR: gl.constexpr = 2 if FORM.GATED else 1
    LAYOUT: gl.constexpr = x_tiles.layout
    dtype: gl.constexpr = x_tiles.dtype
    STAGES: gl.constexpr = FORM.STAGES
    DEPTH: gl.constexpr = FORM.DEPTH
    x = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, DEPTH], LAYOUT)
    wide = gl.allocate_shared_memory(dtype, [STAGES, WIDE, DEPTH], LAYOUT)
    rest = gl.allocate_shared_memory(dtype, [STAGES, REST, DEPTH], LAYOUT)
    slot_shape: gl.constexpr = [CONSUMERS, CONSUMER_ROWS, WIDE // PAIR]
    slots = gl.allocate_shared_memory(dtype, slot_shape, y_wide.layout)
    rest_shape: gl.constexpr = [CONSUMERS, CONSUMER_ROWS, REST // PAIR]
    rest_slots = gl.allocate_shared_memory(dtype, rest_shape, y_rest.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), (free,))
    # 3. two consumers and their producer
    pipeline = ChainPipeline(x, wide, rest, full, free)
    sizes = ChainSizes(m, n, 1, steps)
    run_warps(
        _consume,
        pipeline,
        slots,
        (rest_slots, y_wide, y_rest, bias, sizes, FORM),
        CONSUMER_REGISTERS,
        produce,
        (x_tiles, w_wide, w_rest, pipeline, sizes, FORM),
        PRODUCER_REGISTERS,
    )
    # 4. nor does a follower come before the first of a pair has ended
    await_first(DEPENDENT)
