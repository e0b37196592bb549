"""Products of experts, warp-specialised: one producer warp, two consumer warpgroups (Hopper).

    y[s, n] = round(sum over k of x[s, k] * w[e, n, k] + bias[e, n])
    gated:  y[s, i] = round(act(g[s, i], u[s, i]))   g, u: columns of the chain, by eights

    S, N, K   slots (rows in groups of one expert), weight rows of an expert, depth: `steps` of BK
    e         the expert of a slot's block of SLOTS; blocks of an expert stand together
    x_tiles [S, K], w_tiles [E * N, K], bias [E, N]: 2-byte values
    y_tiles   y [S, N], gated [S, N / 2]: 2-byte values

The weight stands on the M side of the matrix instruction: a tile is 128 weight rows, 64 for each
consumer, by one block's slots. Each value is one fp32 chain from +0 in ascending K, so it has the
bits of the dense column product, whichever side the weight is on there.

The grid is fixed, and the count of blocks is read on the device, so CUDA graphs hold. The producer
keeps the pipeline full across tiles. Slots of a block that belong to no row are computed and stored
like others: they may hold anything. `SHARED`: all blocks read the same rows, those of the step.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tpdet.kernels.cuda.experts.activation import activated
from tpdet.kernels.cuda.gemm.variants.chain import chain
from tpdet.kernels.cuda.gemm.variants.warp_specialised import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
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
    run_warps,
    slot_of,
    wait_free,
)
from tpdet.kernels.inputs.gated import GROUP

WEIGHT_ROWS = gl.constexpr(CONSUMERS.value * CONSUMER_ROWS.value)
_GROUP = gl.constexpr(GROUP)
_VALUE_BYTES = gl.constexpr(2)  # of x and w


class Pipeline(NamedTuple):
    """What the producer fills; each slot of w holds one consumer's rows."""

    w: Any  # [CONSUMERS * STAGES, CONSUMER_ROWS, BK]
    x: Any  # [STAGES, SLOTS, BK]
    full: Any
    free: Any


class Problem(NamedTuple):
    """blocks: int32, their count and then the expert of each; n: weight rows; steps: of K."""

    blocks: Any
    n: Any
    steps: Any


@gluon.jit
def _tile(tile, problem):
    """A tile's expert, block and first weight row; tiles of one block are neighbours."""
    wide = gl.cdiv(problem.n, WEIGHT_ROWS)
    block = tile // wide
    return gl.load(problem.blocks + (1 + block)), block, tile % wide * WEIGHT_ROWS


@gluon.jit
def _tile_count(problem):
    return gl.load(problem.blocks + 0) * gl.cdiv(problem.n, WEIGHT_ROWS)


@gluon.jit
def _produce(
    w_tiles, x_tiles, pipeline, problem, SLOTS: gl.constexpr, BK: gl.constexpr, SHARED: gl.constexpr
):
    """The producer warp: all steps of all tiles of this program."""
    at = 0
    for tile in range(gl.program_id(0), _tile_count(problem), gl.num_programs(0)):
        expert, block, column = _tile(tile, problem)
        row = block * (0 if SHARED else SLOTS)
        weight_row = expert * problem.n + column
        for step in range(problem.steps):
            slot = slot_of(pipeline.free, at)
            depth = step * BK
            wait_free(pipeline.free, at)
            expect(pipeline.full, slot, (WEIGHT_ROWS + SLOTS) * BK * _VALUE_BYTES)
            full = pipeline.full.index(slot)
            copy_tile(w_tiles, [weight_row, depth], full, pipeline.w.index(2 * slot))
            second = [weight_row + CONSUMER_ROWS, depth]
            copy_tile(w_tiles, second, full, pipeline.w.index(2 * slot + 1))
            copy_tile(x_tiles, [row, depth], full, pipeline.x.index(slot))
            at += 1


@gluon.jit
def _shifted(total, bias, column, n):
    """total + bias in fp32; `bias` is the expert's, and `column` this consumer's first row."""
    BY_LANE: gl.constexpr = accumulator_layout(total.shape[1])
    rows = column + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
    return total + gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _gated(total, ACTIVATION: gl.constexpr):
    """Rows of gates and ups in turn, by eights -> the activation, half as many rows."""
    SLOTS: gl.constexpr = total.shape[1]
    PAIRS: gl.constexpr = CONSUMER_ROWS // (2 * _GROUP)
    apart = total.reshape([PAIRS, 2, _GROUP, SLOTS]).permute([0, 2, 3, 1])
    gate, up = apart.split()
    return activated(gate, up, ACTIVATION).reshape([CONSUMER_ROWS // 2, SLOTS])


@gluon.jit
def _consume(
    consumer,
    pipeline,
    slot,
    y_tiles,
    bias,
    problem,
    SLOTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """A consumer warpgroup, 0 or 1: its half of the weight rows in all tiles of this program."""
    PAIR: gl.constexpr = 1 if ACTIVATION == "" else 2
    at = 0
    for tile in range(gl.program_id(0), _tile_count(problem), gl.num_programs(0)):
        expert, block, column = _tile(tile, problem)
        column += consumer * CONSUMER_ROWS
        # 1. the chain, its bias and its activation
        total = chain(pipeline.w, pipeline.x, pipeline, consumer, at, problem.steps, SLOTS)
        at += problem.steps
        if HAS_BIAS:
            total = _shifted(total, bias + expert * problem.n, column, problem.n)
        if ACTIVATION != "":
            total = _gated(total, ACTIVATION)
        # 2. the slot is free once its last tile has been read; this one leaves meanwhile
        tma.store_wait(0)
        tl.debug_barrier()
        slot.permute((1, 0)).store(total.to(slot.dtype))
        fence_async_shared()
        tl.debug_barrier()
        if column < problem.n:
            send_tile(y_tiles, [block * SLOTS, column // PAIR], slot)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps"])
def warp_specialised_groups(
    w_tiles,
    x_tiles,
    y_tiles,
    bias,
    blocks,
    n,
    steps,
    SLOTS: gl.constexpr,
    BK: gl.constexpr,
    SHARED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """All tiles of the blocks that exist, a program taking every num_programs-th.

    w_tiles: weight [E * n, k] in blocks [64, BK]; x_tiles: x [S, k] in blocks [SLOTS, BK]; y_tiles:
    y [S, n] in blocks [SLOTS, 64], gated [SLOTS, 32]. ACTIVATION: "" or its name, and then weight
    rows are interleaved. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and a slot for each consumer's finished tile
    ACROSS: gl.constexpr = CONSUMER_ROWS if ACTIVATION == "" else CONSUMER_ROWS // 2
    LAYOUT: gl.constexpr = w_tiles.layout
    dtype: gl.constexpr = w_tiles.dtype
    w = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, BK], LAYOUT)
    x = gl.allocate_shared_memory(dtype, [STAGES, SLOTS, BK], LAYOUT)
    slots = gl.allocate_shared_memory(dtype, [CONSUMERS, SLOTS, ACROSS], y_tiles.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), free)
    # 3. two consumers and their producer
    pipeline = Pipeline(w, x, full, free)
    problem = Problem(blocks, n, steps)
    run_warps(
        _consume,
        pipeline,
        slots,
        (y_tiles, bias, problem, SLOTS, HAS_BIAS, ACTIVATION),
        CONSUMER_REGISTERS,
        _produce,
        (w_tiles, x_tiles, pipeline, problem, SLOTS, BK, SHARED),
        PRODUCER_REGISTERS,
    )
