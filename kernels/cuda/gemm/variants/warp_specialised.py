"""Warp-specialised GEMM: one producer warp, two consumer warpgroups.

    y[r] = ((g_0 + g_1) + g_2) + ...,  g = p_0 or p_0 + p_1,  p = l_i or l_i + l_(i+1)
    column:  y[m, n] = round(l_0 + bias[n])

A tile has 128 rows, 64 for each group of warps, and 128 columns. The fetching warp keeps a ring of
stages full across leaves and tiles, so that no leaf's start waits for loads, and while one group
adds up what a leaf left, the other's products run. Each leaf is its own fp32 chain from +0 in
ascending K; sums start from -0.0, the identity of addition.

A leaf's accumulator is 64 registers a thread: the leaf under way, the leaf it pairs with and the
chain's total stay in registers. Where the order has a fourth level (`tree`) the finished half rests
in the place that the tile is stored from. With 256 columns some of these would have to rest in
memory: on an H200 that took 1.1 to 3 times as long, for every order and shape. A column product has
one leaf and one accumulator, so its tile has 256.

A finished tile goes to shared memory, from where the tensor memory accelerator stores it while the
next one is computed. Where the ring leaves no room for it, or tiles of several roots would reach
into each other, threads store what they hold. Hopper only.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import copy_tile, release

send_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # Triton 3.6
ROWS = gl.constexpr(64)  # of a group of four warps: the height of their instructions
PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def _fetch(
    x_tiles,
    w_tiles,
    x_ring,
    w_ring,
    full,
    free,
    m,
    n,
    roots,
    steps,
    COLUMNS: gl.constexpr,
    BK: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The fetching warp: all steps of all leaves of all tiles of this program."""
    blocks = gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, 2 * ROWS, COLUMNS)
        first = tile // blocks * LEAVES
        for leaf in range(first, first + LEAVES):
            for step in range(steps):
                place = at % STAGES
                depth = (leaf * steps + step) * BK
                mbarrier.wait(free.index(place), at // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(place), 2 * ROWS * BK * 2 + COLUMNS * BK * 2)
                copy_tile(x_tiles, [row, depth], full.index(place), x_ring.index(2 * place))
                copy_tile(
                    x_tiles, [row + ROWS, depth], full.index(place), x_ring.index(2 * place + 1)
                )
                copy_tile(
                    w_tiles, [leaf * n + column, step * BK], full.index(place), w_ring.index(place)
                )
                at += 1


@gluon.jit
def _chain(
    x_ring, w_ring, full, free, half, at, steps, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """One leaf of this group's rows [ROWS, COLUMNS], from step number `at` of the ring on."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros((ROWS, COLUMNS), gl.float32, layout=BY_LANE)
    for step in range(at, at + steps):
        place = step % STAGES
        mbarrier.wait(full.index(place), step // STAGES & 1)
        total = warpgroup_mma(
            x_ring.index(2 * place + half),
            w_ring.index(place).permute((1, 0)),
            total,
            is_async=True,
        )
        total = warpgroup_mma_wait(1, deps=(total,))
        if step > at:
            release(free.index((step - 1) % STAGES))
    total = warpgroup_mma_wait(0, deps=(total,))
    release(free.index((at + steps - 1) % STAGES))
    return total


@gluon.jit
def _minus_zeros(COLUMNS: gl.constexpr):
    """-0.0 everywhere [ROWS, COLUMNS]: x + -0.0 is x for every x, -0.0 too."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    bits = gl.full((ROWS, COLUMNS), -2147483648, gl.int32, layout=BY_LANE)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def _put(y, root, row, column, value, m, n, EVEN: gl.constexpr):
    """y[root, row:, column:] = value [ROWS, COLUMNS], clipped at M and N. EVEN: none is past N."""
    COLUMNS: gl.constexpr = value.shape[1]
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_LANE))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_LANE))
    here = (rows < m)[:, None]
    if not EVEN:
        here = here & (columns < n)[None, :]
    to = y + ((root * m + rows).to(gl.int64) * n)[:, None] + columns[None, :]
    gl.store(to, value.to(y.dtype.element_ty), mask=here)


@gluon.jit
def _fill(place, value):
    """A tile rests in its place, once what was there has been sent and read by everyone."""
    tma.store_wait(0)
    tl.debug_barrier()
    place.store(value.to(place.dtype))


@gluon.jit
def _shifted(value, bias, column, n):
    """value [ROWS, COLUMNS] + bias from `column` on, in fp32."""
    COLUMNS: gl.constexpr = value.shape[1]
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_LANE))
    return value + gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _fold_group(
    x_ring,
    w_ring,
    full,
    free,
    half,
    at,
    steps,
    COLUMNS: gl.constexpr,
    CHAINED: gl.constexpr,
    PAIR: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A chain of CHAINED parts of PAIR leaves each, from step number `at` of the ring on."""
    if CHAINED * PAIR == 1:
        total = _chain(x_ring, w_ring, full, free, half, at, steps, COLUMNS, STAGES)
    else:
        total = _minus_zeros(COLUMNS)
        for _ in range(CHAINED):
            term = _chain(x_ring, w_ring, full, free, half, at, steps, COLUMNS, STAGES)
            at += steps
            if PAIR == 2:
                term += _chain(x_ring, w_ring, full, free, half, at, steps, COLUMNS, STAGES)
                at += steps
            total += term
    return total


@gluon.jit
def _fold_tile(
    x_ring,
    w_ring,
    full,
    free,
    place,
    half,
    at,
    steps,
    COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
    PAIR: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group's rows of one tile of one root. Of the fourth level, halves rest in `place`."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    TURNS: gl.constexpr = 1 if PARTS == 1 else GROUPS
    CHAINED: gl.constexpr = GROUPS if PARTS == 1 else PARTS
    total = _fold_group(x_ring, w_ring, full, free, half, at, steps, COLUMNS, CHAINED, PAIR, STAGES)
    if TURNS > 1:
        for turn in range(1, TURNS):
            _fill(place, total)
            begin = at + turn * CHAINED * PAIR * steps
            later = _fold_group(
                x_ring, w_ring, full, free, half, begin, steps, COLUMNS, CHAINED, PAIR, STAGES
            )
            total = place.load(BY_LANE) + later
    return total


@gluon.jit
def _consume(
    x_ring,
    w_ring,
    full,
    free,
    place,
    y_tiles,
    y,
    bias,
    half,
    m,
    n,
    roots,
    steps,
    COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
    PAIR: gl.constexpr,
    EVEN: gl.constexpr,
    SENT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of four warps: its 64 rows of all tiles of this program."""
    blocks = gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, 2 * ROWS, COLUMNS)
        row += half * ROWS
        root = tile // blocks
        total = _fold_tile(
            x_ring, w_ring, full, free, place, half, at, steps, COLUMNS, GROUPS, PARTS, PAIR, STAGES
        )
        at += GROUPS * PARTS * PAIR * steps
        if HAS_BIAS:
            total = _shifted(total, bias, column, n)
        if SENT:
            _fill(place, total)
            fence_async_shared()
            tl.debug_barrier()
            if row < m:
                send_tile(y_tiles, [root * m + row, column], place)
        else:
            _put(y, root, row, column, total, m, n, EVEN)
    if SENT:
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
    COLUMNS: gl.constexpr,
    BK: gl.constexpr,
    GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
    PAIR: gl.constexpr,
    EVEN: gl.constexpr,
    SENT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [128, COLUMNS] of all roots of y [roots, m, n], a leaf `steps` = k / BK steps.

    x_tiles: x [m, L * k] in blocks [64, BK]; w_tiles: the weight [L * n, k] in blocks [COLUMNS,
    BK]; L = roots * GROUPS * PARTS * PAIR. SENT: tiles leave by y_tiles, y [roots * m, n] in blocks
    [64, COLUMNS], and m is a multiple of 64 if there are several roots. num_warps=4.
    """
    await_earlier(DEPENDENT)
    LEAVES: gl.constexpr = GROUPS * PARTS * PAIR
    RESTS: gl.constexpr = PARTS == 2 and GROUPS > 1
    RING: gl.constexpr = x_tiles.layout
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [2 * STAGES, ROWS, BK], RING)
    w_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, COLUMNS, BK], RING)
    HELD: gl.constexpr = ROWS if SENT or RESTS else 8  # else a place that nobody uses
    places = gl.allocate_shared_memory(y_tiles.dtype, [2, HELD, COLUMNS], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_ring,
                    w_ring,
                    full,
                    free,
                    places.index(0),
                    y_tiles,
                    y,
                    bias,
                    0,
                    m,
                    n,
                    roots,
                    steps,
                    COLUMNS,
                    GROUPS,
                    PARTS,
                    PAIR,
                    EVEN,
                    SENT,
                    HAS_BIAS,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    x_ring,
                    w_ring,
                    full,
                    free,
                    places.index(1),
                    y_tiles,
                    y,
                    bias,
                    1,
                    m,
                    n,
                    roots,
                    steps,
                    COLUMNS,
                    GROUPS,
                    PARTS,
                    PAIR,
                    EVEN,
                    SENT,
                    HAS_BIAS,
                    STAGES,
                ),
            ),
            (
                _fetch,
                (
                    x_tiles,
                    w_tiles,
                    x_ring,
                    w_ring,
                    full,
                    free,
                    m,
                    n,
                    roots,
                    steps,
                    COLUMNS,
                    BK,
                    LEAVES,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
