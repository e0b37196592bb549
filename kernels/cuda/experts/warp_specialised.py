"""Products of experts, warp-specialised: one producer warp, two consumer warpgroups (Hopper).

    y[s, n] = round(sum over k of x[s, k] * w[e, n, k] + bias[e, n])
    gated:  y[s, i] = round(act(g[s, i], u[s, i]))   g, u: columns of the chain, by eights

    S, N, K   slots (rows in groups of one expert), weight rows of an expert, depth: `steps` of BK
    e         the expert of a slot's block of rows; blocks of an expert stand together
    x_tiles [S, K], w_tiles [E * N, K], bias [E, N]: 2-byte values
    y_tiles   y [S, N], gated [S, N / 2]: 2-byte values

A tile's longer operand has 128 rows, 64 for each consumer, and stands on the M side of the matrix
instruction: the weight's rows where a block has few slots (`SWAPPED`, WIDTH slots), the slots where
it has 128 (WIDTH weight rows). Each value is one fp32 chain from +0 in ascending K, so it has the
bits of the dense column product whichever side the weight is on.

The grid is fixed, and the count of blocks is read on the device, so CUDA graphs hold. The producer
keeps the pipeline full across tiles. Slots of a block that belong to no row are computed and stored
like others: they may hold anything. `SHARED`: all blocks read the same rows, those of the step.
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

from tpdet.kernels.cuda.experts.activation import activated
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
    release,
    run_warps,
    slot_of,
    wait_free,
    wait_full,
)
from tpdet.kernels.inputs.gated import GROUP

LONG_ROWS = gl.constexpr(CONSUMERS.value * CONSUMER_ROWS.value)
_GROUP = gl.constexpr(GROUP)
_VALUE_BYTES = gl.constexpr(2)  # of x and w


class Pipeline(NamedTuple):
    """What the producer fills: the long operand in halves, a consumer's each, and the other."""

    long: Any  # [CONSUMERS * STAGES, CONSUMER_ROWS, BK]
    other: Any  # [STAGES, WIDTH, BK]
    full: Any
    free: Any


class Problem(NamedTuple):
    """blocks: int32, their count and then the expert of each; n: weight rows; steps: of K."""

    blocks: Any
    n: Any
    steps: Any


@gluon.jit
def _tile(tile, problem, WIDTH: gl.constexpr, SWAPPED: gl.constexpr):
    """A tile's expert, first slot and first weight row; tiles of one block are neighbours."""
    COLUMNS: gl.constexpr = LONG_ROWS if SWAPPED else WIDTH
    ROWS: gl.constexpr = WIDTH if SWAPPED else LONG_ROWS
    wide = gl.cdiv(problem.n, COLUMNS)
    block = tile // wide
    expert = gl.load(problem.blocks + (1 + block))
    return expert, block * ROWS, tile % wide * COLUMNS


@gluon.jit
def _tile_count(problem, WIDTH: gl.constexpr, SWAPPED: gl.constexpr):
    COLUMNS: gl.constexpr = LONG_ROWS if SWAPPED else WIDTH
    return gl.load(problem.blocks + 0) * gl.cdiv(problem.n, COLUMNS)


@gluon.jit
def _produce(
    long_tiles,
    other_tiles,
    pipeline,
    problem,
    WIDTH: gl.constexpr,
    BK: gl.constexpr,
    SWAPPED: gl.constexpr,
    SHARED: gl.constexpr,
):
    """The producer warp: all steps of all tiles of this program."""
    at = 0
    tiles = _tile_count(problem, WIDTH, SWAPPED)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, row, column = _tile(tile, problem, WIDTH, SWAPPED)
        if SHARED:
            row = row * 0
        long_at = row
        other_at = expert * problem.n + column
        if SWAPPED:
            long_at = expert * problem.n + column
            other_at = row
        for step in range(problem.steps):
            slot = slot_of(pipeline.free, at)
            depth = step * BK
            wait_free(pipeline.free, at)
            expect(pipeline.full, slot, (LONG_ROWS + WIDTH) * BK * _VALUE_BYTES)
            full = pipeline.full.index(slot)
            copy_tile(long_tiles, [long_at, depth], full, pipeline.long.index(2 * slot))
            second = [long_at + CONSUMER_ROWS, depth]
            copy_tile(long_tiles, second, full, pipeline.long.index(2 * slot + 1))
            copy_tile(other_tiles, [other_at, depth], full, pipeline.other.index(slot))
            at += 1


@gluon.jit
def _chain(pipeline, consumer, at, steps, WIDTH: gl.constexpr):
    """This consumer's 64 rows of the long operand by WIDTH of the other: a chain over K."""
    BY_LANE: gl.constexpr = accumulator_layout(WIDTH)
    total = gl.zeros((CONSUMER_ROWS, WIDTH), gl.float32, layout=BY_LANE)
    for step in range(at, at + steps):
        slot = slot_of(pipeline.full, step)
        wait_full(pipeline.full, step)
        total = warpgroup_mma(
            pipeline.long.index(2 * slot + consumer),
            pipeline.other.index(slot).permute((1, 0)),
            total,
            is_async=True,
        )
        total = warpgroup_mma_wait(1, deps=(total,))
        if step > at:
            release(pipeline.free, step - 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(pipeline.free, at + steps - 1)
    return total


@gluon.jit
def _shifted(total, bias, column, n, SWAPPED: gl.constexpr):
    """total + bias in fp32; `bias` is the expert's, and `column` the first weight row's."""
    WIDTH: gl.constexpr = total.shape[1]
    BY_LANE: gl.constexpr = accumulator_layout(WIDTH)
    if SWAPPED:
        rows = column + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
        shift = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]
    else:
        columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, BY_LANE))
        shift = gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)[None, :]
    return total + shift


@gluon.jit
def _gated(total, ACTIVATION: gl.constexpr, SWAPPED: gl.constexpr):
    """Interleaved gates and ups, by rows or by columns -> the activation, half as many."""
    WIDTH: gl.constexpr = total.shape[1]
    if SWAPPED:
        PAIRS: gl.constexpr = CONSUMER_ROWS // (2 * _GROUP)
        apart = total.reshape([PAIRS, 2, _GROUP, WIDTH]).permute([0, 2, 3, 1])
        gate, up = apart.split()
        mixed = activated(gate, up, ACTIVATION).reshape([CONSUMER_ROWS // 2, WIDTH])
    else:
        HALF: gl.constexpr = WIDTH // 2
        apart = total.reshape([CONSUMER_ROWS, HALF // _GROUP, 2, _GROUP]).permute([0, 1, 3, 2])
        gate, up = apart.split()
        mixed = activated(gate, up, ACTIVATION).reshape([CONSUMER_ROWS, HALF])
        mixed = gl.convert_layout(mixed, accumulator_layout(HALF), assert_trivial=True)
    return mixed


@gluon.jit
def _consume(
    consumer,
    pipeline,
    slot,
    y_tiles,
    bias,
    problem,
    WIDTH: gl.constexpr,
    SWAPPED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """A consumer warpgroup, 0 or 1: its half of the long operand in all tiles of this program."""
    PAIR: gl.constexpr = 1 if ACTIVATION == "" else 2
    at = 0
    tiles = _tile_count(problem, WIDTH, SWAPPED)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, row, column = _tile(tile, problem, WIDTH, SWAPPED)
        if SWAPPED:
            column += consumer * CONSUMER_ROWS
        else:
            row += consumer * CONSUMER_ROWS
        # 1. the chain, its bias and its activation
        total = _chain(pipeline, consumer, at, problem.steps, WIDTH)
        at += problem.steps
        if HAS_BIAS:
            total = _shifted(total, bias + expert * problem.n, column, problem.n, SWAPPED)
        if ACTIVATION != "":
            total = _gated(total, ACTIVATION, SWAPPED)
        # 2. the slot is free once its last tile has been read; this one leaves meanwhile
        tma.store_wait(0)
        tl.debug_barrier()
        if SWAPPED:
            slot.permute((1, 0)).store(total.to(slot.dtype))
        else:
            slot.store(total.to(slot.dtype))
        fence_async_shared()
        tl.debug_barrier()
        if column < problem.n:
            send_tile(y_tiles, [row, column // PAIR], slot)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps"])
def warp_specialised_groups(
    long_tiles,
    other_tiles,
    y_tiles,
    bias,
    blocks,
    n,
    steps,
    WIDTH: gl.constexpr,
    BK: gl.constexpr,
    SWAPPED: gl.constexpr,
    SHARED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """All tiles of the blocks that exist, a program taking every num_programs-th.

    long_tiles, other_tiles: weight [E * n, k] and x [S, k] where SWAPPED, x and weight otherwise,
    in blocks [64, BK] and [WIDTH, BK]. y_tiles: y in blocks of what one consumer has finished.
    ACTIVATION: "" or its name, and then weight rows are interleaved. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and a slot for each consumer's finished tile
    PAIR: gl.constexpr = 1 if ACTIVATION == "" else 2
    LAYOUT: gl.constexpr = long_tiles.layout
    dtype: gl.constexpr = long_tiles.dtype
    long = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, BK], LAYOUT)
    other = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BK], other_tiles.layout)
    HEIGHT: gl.constexpr = WIDTH if SWAPPED else CONSUMER_ROWS
    ACROSS: gl.constexpr = (CONSUMER_ROWS if SWAPPED else WIDTH) // PAIR
    slots = gl.allocate_shared_memory(y_tiles.dtype, [CONSUMERS, HEIGHT, ACROSS], y_tiles.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), free)
    # 3. two consumers and their producer
    pipeline = Pipeline(long, other, full, free)
    problem = Problem(blocks, n, steps)
    run_warps(
        _consume,
        pipeline,
        slots,
        (y_tiles, bias, problem, WIDTH, SWAPPED, HAS_BIAS, ACTIVATION),
        CONSUMER_REGISTERS,
        _produce,
        (long_tiles, other_tiles, pipeline, problem, WIDTH, BK, SWAPPED, SHARED),
        PRODUCER_REGISTERS,
    )
