"""Warp-specialised GEMM: one producer warp, two consumer warpgroups.

    y[r] = ((g_0 + g_1) + g_2) + ...,  g = p_0 or p_0 + p_1,  p = l_i or l_i + l_(i+1)
    column:  y[m, n] = round(l_0 + bias[n])
    gated:   y[m, i] = round(act(g[m, i]) * u[m, i])   g, u: columns of l_0, interleaved by eights

    M, N    rows of x and y, columns of y
    L, R    leaves, roots (1 of a column product)
    K       width of a leaf: `steps` steps of DEPTH
    x_tiles [M, L * K], w_tiles [L * N, K], bias [N]: 2-byte values
    y_tiles, y [R, M, N]: fp32 of row products, 2-byte values of columns

A tile of y has 128 rows, 64 for each consumer, and 128 columns. The producer keeps all stages of
the pipeline full across leaves and tiles, so that no leaf's start waits for loads, and while one
consumer adds up what a leaf left, the other's products run. Each leaf is one fp32 chain from +0 in
ascending K; sums start from -0.0, the identity of addition.

A leaf's accumulator is 64 registers a thread: the leaf in progress, the leaf it pairs with and the
chain's total stay in registers. Where the order has a fourth level (`tree`) the first terms of the
total rest in the slot that the tile is stored from. With 256 columns some of these would have to
rest in memory: on an H200 that took 1.1 to 3 times as long, for every order and shape. A column
product has one leaf and one accumulator, so its tile has 256.

A finished tile goes to a slot in shared memory, from where the tensor memory accelerator stores it
while the next one is computed. Where the stages leave no room for it, or tiles of several roots
would reach into each other, threads store what they hold. Hopper only.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

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
from tpdet.kernels.cuda.gemm.variants.leaf_fold import MINUS_ZERO
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.launch.dependent import await_earlier, await_first
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    CONSUMERS,
    accumulator_layout,
    allocate_barriers,
    init_barriers,
    run_warps,
)
from tpdet.kernels.inputs.gated import GROUP

_GROUP = gl.constexpr(GROUP)


class ChainSizes(NamedTuple):
    """Sizes of a launch; a leaf has `steps` steps of DEPTH."""

    m: Any
    n: Any
    roots: Any
    steps: Any


class WarpForm(NamedTuple):
    """What a warp-specialised product is compiled for: its tile's columns, depth and stages; the
    groups of a root, parts of a group, leaves of a part; and what follows the chains.

    EVEN: no tile reaches past N. SENT: tiles leave by the accelerator. BIAS: there is one. GATED:
    the number of an activation, 0 without gates.
    """

    COLUMNS: int
    DEPTH: int
    STAGES: int
    GROUPS: int = 1
    PARTS: int = 1
    PAIR: int = 1
    EVEN: bool = True
    SENT: bool = True
    BIAS: bool = False
    GATED: int = 0


@gluon.jit
def produce(x_tiles, w_tiles, w_rest, pipeline, sizes, FORM: gl.constexpr):
    """The producer warp: all steps of all leaves of all tiles of this program."""
    m, n, roots, steps = sizes
    LEAVES: gl.constexpr = FORM.GROUPS * FORM.PARTS * FORM.PAIR
    blocks = gl.cdiv(m, WIDE_ROWS) * gl.cdiv(n, FORM.COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, WIDE_ROWS, FORM.COLUMNS)
        first = tile // blocks * LEAVES
        for leaf in range(first, first + LEAVES):
            for step in range(steps):
                in_x = (leaf * steps + step) * FORM.DEPTH
                in_w = step * FORM.DEPTH
                fill(pipeline, at, x_tiles, row, in_x, w_tiles, w_rest, leaf * n + column, in_w)
                at += 1


@gluon.jit
def _minus_zeros(COLUMNS: gl.constexpr):
    """-0.0 everywhere [CONSUMER_ROWS, COLUMNS]: x + -0.0 is x for every x, -0.0 too."""
    BY_LANE: gl.constexpr = accumulator_layout(COLUMNS)
    bits = gl.full((CONSUMER_ROWS, COLUMNS), MINUS_ZERO, gl.int32, layout=BY_LANE)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def _store_clipped(y, root, row, column, value, m, n, EVEN: gl.constexpr):
    """y[root, row:, column:] = value [64, COLUMNS], clipped at M and N. EVEN: none is past N."""
    COLUMNS: gl.constexpr = value.shape[1]
    BY_LANE: gl.constexpr = accumulator_layout(COLUMNS)
    rows = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_LANE))
    here = (rows < m)[:, None]
    if not EVEN:
        here = here & (columns < n)[None, :]
    to = y + ((root * m + rows).to(gl.int64) * n)[:, None] + columns[None, :]
    gl.store(to, value.to(y.dtype.element_ty), mask=here)


@gluon.jit
def add_bias(value, bias, column, n):
    """value [CONSUMER_ROWS, COLUMNS] + bias from `column` on, in fp32."""
    COLUMNS: gl.constexpr = value.shape[1]
    BY_LANE: gl.constexpr = accumulator_layout(COLUMNS)
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_LANE))
    return value + gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def gate_tile(total, ACTIVATION: gl.constexpr):
    """Interleaved [CONSUMER_ROWS, COLUMNS] -> act(gate) * up, half as wide and laid out alike."""
    WIDTH: gl.constexpr = total.shape[1] // 2
    apart = total.reshape([CONSUMER_ROWS, WIDTH // _GROUP, 2, _GROUP]).permute([0, 1, 3, 2])
    gate, up = apart.split()
    joined = join(gate, up, ACTIVATION).reshape([CONSUMER_ROWS, WIDTH])
    return gl.convert_layout(joined, accumulator_layout(WIDTH), assert_trivial=True)


@gluon.jit
def _fold_groups(pipeline, consumer, at, steps, FORM: gl.constexpr, CHAINED: gl.constexpr):
    """A chain of CHAINED terms, of PAIR leaves each, from the pipeline's step `at` on."""
    COLUMNS: gl.constexpr = FORM.COLUMNS
    if CHAINED * FORM.PAIR == 1:
        total = chain(pipeline, consumer, at, steps, COLUMNS)
    else:
        total = _minus_zeros(COLUMNS)
        for _ in range(CHAINED):
            term = chain(pipeline, consumer, at, steps, COLUMNS)
            at += steps
            if FORM.PAIR == 2:
                term += chain(pipeline, consumer, at, steps, COLUMNS)
                at += steps
            total += term
    return total


@gluon.jit
def _fold_tile(pipeline, consumer, slot, at, steps, FORM: gl.constexpr):
    """A consumer's rows of one tile of one root. Of `tree`, the first terms rest in `slot`."""
    BY_LANE: gl.constexpr = accumulator_layout(FORM.COLUMNS)
    TURNS: gl.constexpr = 1 if FORM.PARTS == 1 else FORM.GROUPS
    CHAINED: gl.constexpr = FORM.GROUPS if FORM.PARTS == 1 else FORM.PARTS
    total = _fold_groups(pipeline, consumer, at, steps, FORM, CHAINED)
    if TURNS > 1:
        for turn in range(1, TURNS):
            keep(slot, total, 0)
            begin = at + turn * CHAINED * FORM.PAIR * steps
            later = _fold_groups(pipeline, consumer, begin, steps, FORM, CHAINED)
            total = slot.load(BY_LANE) + later
    return total


@gluon.jit
def _consume(consumer, pipeline, slot, y_tiles, y, bias, sizes, FORM: gl.constexpr):
    """A consumer warpgroup, 0 or 1: its 64 rows of all tiles of this program."""
    m, n, roots, steps = sizes
    blocks = gl.cdiv(m, WIDE_ROWS) * gl.cdiv(n, FORM.COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, WIDE_ROWS, FORM.COLUMNS)
        row += consumer * CONSUMER_ROWS
        root = tile // blocks
        # 1. fold the leaves of the root
        total = _fold_tile(pipeline, consumer, slot, at, steps, FORM)
        at += FORM.GROUPS * FORM.PARTS * FORM.PAIR * steps
        if FORM.BIAS:
            total = add_bias(total, bias, column, n)
        if FORM.GATED:
            total = gate_tile(total, FORM.GATED)
            column = column // 2
        # 2. store the tile: by the accelerator, while the next one is computed, or by threads
        if FORM.SENT:
            keep(slot, total, 0)
            send(slot, y_tiles, [root * m + row, column], row < m)
        else:
            _store_clipped(y, root, row, column, total, m, n, FORM.EVEN)
    if FORM.SENT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "roots", "steps"])
def warp_specialised_fold(
    x_tiles,
    w_tiles,
    y_tiles,
    y,
    bias,
    m,
    n,
    roots,
    steps,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [128, COLUMNS] of all roots of y [roots, m, n], a leaf `steps` = k / DEPTH steps.

    x_tiles: x [m, L * k] in blocks [64, DEPTH]; w_tiles: the weight [L * n, k] in blocks [COLUMNS,
    DEPTH]; L = roots * GROUPS * PARTS * PAIR. SENT: tiles leave by y_tiles, y [roots * m, n] in
    blocks [64, COLUMNS], and m is a multiple of 64 if there are several roots. GATED: one leaf,
    SENT, weight rows interleaved, and y [m, n / 2] in blocks [64, COLUMNS / 2]. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, and a slot for each consumer's finished tile
    RESTS: gl.constexpr = FORM.PARTS == 2 and FORM.GROUPS > 1
    LAYOUT: gl.constexpr = x_tiles.layout
    dtype: gl.constexpr = x_tiles.dtype
    STAGES: gl.constexpr = FORM.STAGES
    DEPTH: gl.constexpr = FORM.DEPTH
    COLUMNS: gl.constexpr = FORM.COLUMNS
    x = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, DEPTH], LAYOUT)
    w = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, DEPTH], LAYOUT)
    HELD: gl.constexpr = CONSUMER_ROWS if FORM.SENT or RESTS else 8  # else nobody uses the slot
    WIDTH: gl.constexpr = COLUMNS // 2 if FORM.GATED else COLUMNS
    slots = gl.allocate_shared_memory(y_tiles.dtype, [CONSUMERS, HELD, WIDTH], y_tiles.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), (free,))
    # 3. two consumers and their producer
    pipeline = ChainPipeline(x, w, None, full, free)
    sizes = ChainSizes(m, n, roots, steps)
    run_warps(
        _consume,
        pipeline,
        slots,
        (y_tiles, y, bias, sizes, FORM),
        CONSUMER_REGISTERS,
        produce,
        (x_tiles, w_tiles, None, pipeline, sizes, FORM),
        PRODUCER_REGISTERS,
    )
    # 4. nor does a follower come before the first of a pair has ended
    await_first(DEPENDENT)
