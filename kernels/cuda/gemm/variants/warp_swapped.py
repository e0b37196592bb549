"""Products of experts, warp-specialised: one producer warp, two consumer warpgroups (Hopper).

    y[p, n] = round(sum over k of x[p, k] * w[e, n, k] + bias[e, n])
    gated:  y[p, i] = round(join(g[p, i], u[p, i]))   g, u: columns of the chain, by eights

    P, N, K   rows in the sorted order of tokens, weight rows of an expert, depth: `steps` of DEPTH
    e         the expert of a row's block of ROWS; blocks of an expert stand together
    x_tiles [P, K], w_tiles [E * N, K], bias [E, N]: 2-byte values
    y_tiles   y [P, N], gated [P, N / 2]: 2-byte values

The weight stands on the M side of the matrix instruction: a tile is 128 weight rows, 64 for each
consumer, by one block's rows. Each value is one fp32 chain from +0 in ascending K, so it has the
bits of the dense column product, whichever side the weight is on there.

The grid is fixed, and the count of blocks is read on the device, so CUDA graphs hold. The producer
keeps the pipeline full across tiles. Rows of a block that belong to no token are computed and
stored like others: they may hold anything. `SHARED`: all blocks read the rows of the step.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm.variants.chain import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WIDE_ROWS,
    ChainPipeline,
    chain,
    fill,
    keep,
    send,
)
from tpdet.kernels.cuda.gemm.variants.gated import join
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands, ProductShape, Variant
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    CONSUMERS,
    accumulator_layout,
    allocate_barriers,
    init_barriers,
    run_warps,
    tile_layout,
)
from tpdet.kernels.inputs.gated import GROUP

_GROUP = gl.constexpr(GROUP)
_LINE = 128  # bytes of a row of a stage: one swizzled line
_BARRIERS = 1024  # bytes
_ROWS = (8, 16, 32, 64, 128, 256)


class ExpertSizes(NamedTuple):
    """expert_ids: int32, how many blocks there are and the expert of each; n: weight rows; steps:
    of K."""

    expert_ids: Any
    n: Any
    steps: Any


class SwappedForm(NamedTuple):
    """What the kernel is compiled for: rows of a block, the depth and number of stages; GATED: the
    number of what joins gates and ups, 0 without."""

    ROWS: int
    DEPTH: int
    STAGES: int
    SHARED: bool
    BIAS: bool
    GATED: int


@gluon.jit
def _locate(tile, sizes):
    """A tile's expert, block and first weight row; tiles of one block are neighbours."""
    wide = gl.cdiv(sizes.n, WIDE_ROWS)
    block = tile // wide
    return gl.load(sizes.expert_ids + (1 + block)), block, tile % wide * WIDE_ROWS


@gluon.jit
def _tile_count(sizes):
    return gl.load(sizes.expert_ids + 0) * gl.cdiv(sizes.n, WIDE_ROWS)


@gluon.jit
def _produce(w_tiles, x_tiles, pipeline, sizes, FORM: gl.constexpr):
    """The producer warp: all steps of all tiles of this program."""
    at = 0
    for tile in range(gl.program_id(0), _tile_count(sizes), gl.num_programs(0)):
        expert, block, column = _locate(tile, sizes)
        row = block * (0 if FORM.SHARED else FORM.ROWS)
        weight_row = expert * sizes.n + column
        for step in range(sizes.steps):
            depth = step * FORM.DEPTH
            fill(pipeline, at, w_tiles, weight_row, depth, x_tiles, None, row, depth)
            at += 1


@gluon.jit
def _shifted(total, bias, column, n):
    """total + bias in fp32; `bias` is the expert's, and `column` this consumer's first row."""
    BY_LANE: gl.constexpr = accumulator_layout(total.shape[1])
    rows = column + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
    return total + gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _gated(total, ACTIVATION: gl.constexpr):
    """Rows of gates and ups in turn, by eights -> joined, half as many rows."""
    ROWS: gl.constexpr = total.shape[1]
    PAIRS: gl.constexpr = CONSUMER_ROWS // (2 * _GROUP)
    apart = total.reshape([PAIRS, 2, _GROUP, ROWS]).permute([0, 2, 3, 1])
    gate, up = apart.split()
    return join(gate, up, ACTIVATION).reshape([CONSUMER_ROWS // 2, ROWS])


@gluon.jit
def _consume(consumer, pipeline, slot, y_tiles, bias, sizes, FORM: gl.constexpr):
    """A consumer warpgroup, 0 or 1: its half of the weight rows in all tiles of this program."""
    PAIR: gl.constexpr = 2 if FORM.GATED else 1
    at = 0
    for tile in range(gl.program_id(0), _tile_count(sizes), gl.num_programs(0)):
        expert, block, column = _locate(tile, sizes)
        column += consumer * CONSUMER_ROWS
        # 1. the chain, its bias and its gates
        total = chain(pipeline, consumer, at, sizes.steps, FORM.ROWS)
        at += sizes.steps
        if FORM.BIAS:
            total = _shifted(total, bias + expert * sizes.n, column, sizes.n)
        if FORM.GATED:
            total = _gated(total, FORM.GATED)
        # 2. the slot is free once its last tile has been read; this one leaves meanwhile
        keep(slot.permute((1, 0)), total, 0)
        send(slot, y_tiles, [block * FORM.ROWS, column // PAIR], column < sizes.n)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps"])
def warp_swapped_chain(
    w_tiles,
    x_tiles,
    y_tiles,
    bias,
    expert_ids,
    n,
    steps,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """All tiles of the blocks that exist, a program taking every num_programs-th.

    w_tiles: weight [E * n, k] in blocks [64, DEPTH]; x_tiles: x [P, k] in blocks [ROWS, DEPTH];
    y_tiles: y [P, n] in blocks [ROWS, 64], gated [ROWS, 32]. GATED: weight rows are interleaved.
    num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and a slot for each consumer's finished tile
    ACROSS: gl.constexpr = CONSUMER_ROWS // 2 if FORM.GATED else CONSUMER_ROWS
    LAYOUT: gl.constexpr = w_tiles.layout
    dtype: gl.constexpr = w_tiles.dtype
    STAGES: gl.constexpr = FORM.STAGES
    DEPTH: gl.constexpr = FORM.DEPTH
    ROWS: gl.constexpr = FORM.ROWS
    w = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, DEPTH], LAYOUT)
    x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], LAYOUT)
    slots = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, ACROSS], y_tiles.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), (free,))
    # 3. two consumers and their producer
    pipeline = ChainPipeline(w, x, None, full, free)
    sizes = ExpertSizes(expert_ids, n, steps)
    run_warps(
        _consume,
        pipeline,
        slots,
        (y_tiles, bias, sizes, FORM),
        CONSUMER_REGISTERS,
        _produce,
        (w_tiles, x_tiles, pipeline, sizes, FORM),
        PRODUCER_REGISTERS,
    )


def run_warp_swapped(operands: Operands, tile: Tile, sms: int) -> None:
    """y of experts is filled by up to `sms` programs, or tile.ctas times as many."""
    x, w, bias, y = operands[:4]
    (count, n, k), rows, size = w.shape, CONSUMER_ROWS.value, x.element_size()
    across = rows // operands.pair
    stage = tile_layout(_LINE, 8 * size)
    slot = tile_layout(across * size, 8 * size)
    warp_swapped_chain[(min(sms * tile.ctas, operands.expert_tiles(tile)),)](
        TensorDescriptor.from_tensor(w.view(count * n, k), [rows, tile.depth], stage),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth], stage),
        TensorDescriptor.from_tensor(y, [tile.rows, across], slot),
        w if bias is None else bias,
        operands.expert_ids,
        n,
        k // tile.depth,
        FORM=SwappedForm(
            tile.rows, tile.depth, tile.stages, operands.shared, bias is not None, operands.gated
        ),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _shared_bytes(tile: Tile, size: int) -> int:
    """Stages, barriers and slots for a finished tile of values of `size` bytes."""
    return tile.stage_bytes + tile.rows * tile.columns * size + _BARRIERS


def _takes(shape: ProductShape, tile: Tile) -> bool:
    cut = tile.depth * 2 == _LINE and tile.columns == WIDE_ROWS.value and tile.rows in _ROWS
    return cut and shape.out_bytes == 2 and shape.n % (16 if shape.gated else 8) == 0


WARP_SWAPPED = Variant(
    "warp_swapped",
    "swap tma specialised",
    run_warp_swapped,
    True,
    _shared_bytes,
    _takes,
    dense=False,
    experts=True,
)
