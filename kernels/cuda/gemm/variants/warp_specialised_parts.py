"""Warp-specialised column products by tiles of 128 x 192: one producer warp, two consumers.

    column:  y[m, n] = round(sum over k of x[m, k] * w[n, k] + bias[n])
    gated:   y[m, i] = round(act(g[m, i]) * u[m, i])   g, u: columns, interleaved by eights

    M, N, K  rows of x, columns of y, depth: `steps` steps of BK
    x_tiles [M, K], w_wide, w_rest [N, K], bias [N]: 2-byte values
    y_wide, y_rest [M, N], gated [M, N / 2]: 2-byte values

Between 128 and 512 rows the tiles of 128 and of 256 columns often leave a third of the
multiprocessors idle in the last round; 192 columns are the width between. The compiler knows powers
of two only, so a tile has two parts, of 128 and of 64 columns, each with an accumulator: two matrix
instructions a step. Each value is one fp32 chain from +0 in ascending K. Hopper only.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.warp_specialised import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    TILE_ROWS,
    add_bias,
    gate_tile,
    send_tile,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier
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

WIDE = gl.constexpr(128)
REST = gl.constexpr(64)
COLUMNS = gl.constexpr(WIDE.value + REST.value)
_VALUE_BYTES = gl.constexpr(2)  # of x and w


class Pipeline(NamedTuple):
    """What the producer fills and the consumers read; each slot of x holds one consumer's rows."""

    x: Any  # [CONSUMERS * STAGES, CONSUMER_ROWS, BK]
    wide: Any  # [STAGES, WIDE, BK]
    rest: Any  # [STAGES, REST, BK]
    full: Any
    free: Any


@gluon.jit
def _produce(x_tiles, w_wide, w_rest, pipeline, m, n, steps, BK: gl.constexpr):
    """The producer warp: all steps of all tiles of this program."""
    at = 0
    blocks = gl.cdiv(m, TILE_ROWS) * gl.cdiv(n, COLUMNS)
    for tile in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, column = tile_origin(tile, m, n, TILE_ROWS, COLUMNS)
        for step in range(steps):
            slot = slot_of(pipeline.free, at)
            depth = step * BK
            wait_free(pipeline.free, at)
            expect(pipeline.full, slot, (TILE_ROWS + COLUMNS) * BK * _VALUE_BYTES)
            full = pipeline.full.index(slot)
            copy_tile(x_tiles, [row, depth], full, pipeline.x.index(2 * slot))
            copy_tile(x_tiles, [row + CONSUMER_ROWS, depth], full, pipeline.x.index(2 * slot + 1))
            copy_tile(w_wide, [column, depth], full, pipeline.wide.index(slot))
            copy_tile(w_rest, [column + WIDE, depth], full, pipeline.rest.index(slot))
            at += 1


@gluon.jit
def _send(slot, tiles, at, value):
    """slot = value, rounded, once what was there has been sent; then it is on its way to `at`."""
    tma.store_wait(1)  # of a tile's two parts, the other may still be on its way
    tl.debug_barrier()
    slot.store(value.to(slot.dtype))
    fence_async_shared()
    tl.debug_barrier()
    send_tile(tiles, at, slot)


@gluon.jit
def _consume(
    consumer,
    pipeline,
    slot,
    rest_slots,
    y_wide,
    y_rest,
    bias,
    m,
    n,
    steps,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
):
    """A consumer warpgroup, 0 or 1: its 64 rows of all tiles of this program."""
    BY_WIDE: gl.constexpr = accumulator_layout(WIDE)
    BY_REST: gl.constexpr = accumulator_layout(REST)
    PAIR: gl.constexpr = 2 if GATED else 1
    rest_slot = rest_slots.index(consumer)
    blocks = gl.cdiv(m, TILE_ROWS) * gl.cdiv(n, COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, column = tile_origin(tile, m, n, TILE_ROWS, COLUMNS)
        row += consumer * CONSUMER_ROWS
        # 1. both chains; a step's slot is released when the next step's products run
        wide = gl.zeros((CONSUMER_ROWS, WIDE), gl.float32, layout=BY_WIDE)
        rest = gl.zeros((CONSUMER_ROWS, REST), gl.float32, layout=BY_REST)
        for step in range(at, at + steps):
            slot_at = slot_of(pipeline.full, step)
            wait_full(pipeline.full, step)
            x = pipeline.x.index(2 * slot_at + consumer)
            w = pipeline.wide.index(slot_at).permute((1, 0))
            w_rest = pipeline.rest.index(slot_at).permute((1, 0))
            wide = warpgroup_mma(x, w, wide, is_async=True)
            rest = warpgroup_mma(x, w_rest, rest, is_async=True)
            wide, rest = warpgroup_mma_wait(2, deps=(wide, rest))
            if step > at:
                release(pipeline.free, step - 1)
        wide, rest = warpgroup_mma_wait(0, deps=(wide, rest))
        at += steps
        release(pipeline.free, at - 1)
        # 2. the epilogue of each part
        if HAS_BIAS:
            wide = add_bias(wide, bias, column, n)
            rest = add_bias(rest, bias, column + WIDE, n)
        if GATED:
            wide = gate_tile(wide, GATED)
            rest = gate_tile(rest, GATED)
        # 3. each part leaves by the accelerator, while the next tile is computed
        _send(slot, y_wide, [row, column // PAIR], wide)
        _send(rest_slot, y_rest, [row, (column + WIDE) // PAIR], rest)
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
    BK: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [128, 192] of y [m, n], gated [m, n / 2]; K is `steps` steps of BK.

    x_tiles: x in blocks [64, BK]; w_wide, w_rest: the weight in blocks [128, BK] and [64, BK];
    y_wide, y_rest: y in blocks [64, 128] and [64, 64], gated half as wide. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and two slots for each consumer's finished tile
    PAIR: gl.constexpr = 2 if GATED else 1
    LAYOUT: gl.constexpr = x_tiles.layout
    dtype: gl.constexpr = x_tiles.dtype
    x = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, BK], LAYOUT)
    wide = gl.allocate_shared_memory(dtype, [STAGES, WIDE, BK], LAYOUT)
    rest = gl.allocate_shared_memory(dtype, [STAGES, REST, BK], LAYOUT)
    slots = gl.allocate_shared_memory(
        dtype, [CONSUMERS, CONSUMER_ROWS, WIDE // PAIR], y_wide.layout
    )
    rest_slots = gl.allocate_shared_memory(
        dtype, [CONSUMERS, CONSUMER_ROWS, REST // PAIR], y_rest.layout
    )
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), free)
    # 3. two consumers and their producer
    pipeline = Pipeline(x, wide, rest, full, free)
    run_warps(
        _consume,
        pipeline,
        slots,
        (rest_slots, y_wide, y_rest, bias, m, n, steps, HAS_BIAS, GATED),
        CONSUMER_REGISTERS,
        _produce,
        (x_tiles, w_wide, w_rest, pipeline, m, n, steps, BK),
        PRODUCER_REGISTERS,
    )
