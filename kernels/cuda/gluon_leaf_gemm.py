"""Leaves folded inside a program whose warps have trades: one fetches, two groups of four compute.

    y[r] = ((g_0 + g_1) + g_2) + ...,  g = p_0 or p_0 + p_1,  p = l_i or l_i + l_(i+1)

A tile has 128 rows, 64 for each group of warps, and 128 columns. The fetching warp keeps a ring of
stages full across leaves and tiles, so that no leaf's start waits for loads, and while one group
adds up what a leaf left, the other's products run. Each leaf is its own fp32 chain from +0 in
ascending K; sums start from -0.0, the identity of addition.

A leaf's accumulator is 64 registers a thread: the leaf under way, the leaf it pairs with and the
chain's total stay in registers. Where the order has a fourth level (`tree`) the finished half rests
in y, where every thread reads back what it wrote itself. With 256 columns some of these would have
to rest in memory: on an H200 that took 1.1 to 3 times as long, for every order and shape.

Hopper only.
"""

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm_pointer import tile_origin
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.root_form import RootForm, fold_fits

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6
ROWS = gl.constexpr(64)  # of a group of four warps: the height of their instructions
COLUMNS = gl.constexpr(128)
DEPTH = 64  # of a step: a row of the ring is then one swizzled line of 128 bytes
PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def _fetch(x_tiles, w_tiles, x_ring, w_ring, full, free, m, n, roots, steps,
           BK: gl.constexpr, LEAVES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
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
                copy_tile(x_tiles, [row + ROWS, depth], full.index(place),
                          x_ring.index(2 * place + 1))  # fmt: skip
                copy_tile(w_tiles, [leaf * n + column, step * BK], full.index(place),
                          w_ring.index(place))  # fmt: skip
                at += 1


@gluon.jit
def _release(free):
    """Every warp of the group is done with a place of the ring: only then one thread says so."""
    tl.debug_barrier()
    mbarrier.arrive(free, count=1)


@gluon.jit
def _chain(x_ring, w_ring, full, free, half, at, steps, STAGES: gl.constexpr):
    """One leaf of this group's rows [ROWS, COLUMNS], from step number `at` of the ring on."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros((ROWS, COLUMNS), gl.float32, layout=BY_LANE)
    for step in range(at, at + steps):
        place = step % STAGES
        mbarrier.wait(full.index(place), step // STAGES & 1)
        total = warpgroup_mma(x_ring.index(2 * place + half), w_ring.index(place).permute((1, 0)),
                              total, is_async=True)  # fmt: skip
        total = warpgroup_mma_wait(1, deps=(total,))
        if step > at:
            _release(free.index((step - 1) % STAGES))
    total = warpgroup_mma_wait(0, deps=(total,))
    _release(free.index((at + steps - 1) % STAGES))
    return total


@gluon.jit
def _minus_zeros():
    """-0.0 everywhere [ROWS, COLUMNS]: x + -0.0 is x for every x, -0.0 too."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    bits = gl.full((ROWS, COLUMNS), -2147483648, gl.int32, layout=BY_LANE)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def _put(y, root, row, column, value, m, n, more, MORE: gl.constexpr,
         EVEN: gl.constexpr):  # fmt: skip
    """y[root, row:, column:] = value [ROWS, COLUMNS], or += where `more`; clipped at M and N.

    MORE: `more` may be true at all. EVEN: no column is past N.
    """
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_LANE))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_LANE))
    here = (rows < m)[:, None]
    if not EVEN:
        here = here & (columns < n)[None, :]
    to = y + ((root * m + rows).to(gl.int64) * n)[:, None] + columns[None, :]
    if MORE:  # noqa: SIM102 (known when compiled)
        if more:
            value = gl.load(to, mask=here, other=0.0) + value
    gl.store(to, value, mask=here)


@gluon.jit
def _fold_tile(x_ring, w_ring, full, free, y, half, at, steps, root, row, column, m, n,
               GROUPS: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
               EVEN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group's rows of one tile of one root, from step number `at` of the ring on."""
    TURNS: gl.constexpr = 1 if PARTS == 1 else GROUPS
    CHAINED: gl.constexpr = GROUPS if PARTS == 1 else PARTS
    for turn in range(TURNS):
        total = _minus_zeros()
        for _ in range(CHAINED):
            term = _chain(x_ring, w_ring, full, free, half, at, steps, STAGES)
            at += steps
            if PAIR == 2:
                term += _chain(x_ring, w_ring, full, free, half, at, steps, STAGES)
                at += steps
            total += term
        _put(y, root, row, column, total, m, n, turn > 0, TURNS > 1, EVEN)


@gluon.jit
def _consume(x_ring, w_ring, full, free, y, half, m, n, roots, steps,
             GROUPS: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
             EVEN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: its 64 rows of all tiles of this program."""
    blocks = gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, COLUMNS)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, 2 * ROWS, COLUMNS)
        row += half * ROWS
        root = tile // blocks
        _fold_tile(x_ring, w_ring, full, free, y, half, at, steps, root, row, column,
                   m, n, GROUPS, PARTS, PAIR, EVEN, STAGES)  # fmt: skip
        at += GROUPS * PARTS * PAIR * steps


@gluon.jit(do_not_specialize=["m", "roots", "steps"])
def fold_by_trades(
    x_tiles, w_tiles, y, m, n, roots, steps,
    BK: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
    EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles [128, 128] of all roots of y [roots, m, n] fp32, a leaf `steps` = k / BK steps.

    x_tiles: x [m, L * k] in blocks [64, BK]; w_tiles: the weight [L * n, k] in blocks [128, BK];
    L = roots * GROUPS * PARTS * PAIR. num_warps=4.
    """
    LEAVES: gl.constexpr = GROUPS * PARTS * PAIR
    RING: gl.constexpr = x_tiles.layout
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [2 * STAGES, ROWS, BK], RING)
    w_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, COLUMNS, BK], RING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (x_ring, w_ring, full, free, y, 0, m, n, roots, steps,
                        GROUPS, PARTS, PAIR, EVEN, STAGES)),
            (_consume, (x_ring, w_ring, full, free, y, 1, m, n, roots, steps,
                        GROUPS, PARTS, PAIR, EVEN, STAGES)),
            (_fetch, (x_tiles, w_tiles, x_ring, w_ring, full, free, m, n, roots, steps,
                      BK, LEAVES, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def run_gluon_fold(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, variant: Variant, sms: int
) -> None:
    """x [M, L * K], w [L, N, K], both of 2 bytes -> y [at least form.roots, M, N] fp32, filled.

    Of the variant, the tile (128 x 128 by 64) and the stages count. sms: programs at most. Raises
    ValueError where it does not fit (leaves of one step, for one).
    """
    leaves, n, k = w.shape
    if not fold_fits(form, k, variant, "gluon") or variant.depth != DEPTH:
        raise ValueError(f"leaves of {k} by {variant} do not fit 'gluon': fold them otherwise")
    if sms < 1 or x.element_size() != 2:
        raise ValueError(f"'gluon' takes 2-byte values by descriptors: {x.dtype}, {sms} programs")
    m = x.shape[0]
    layout = gl.NVMMASharedLayout(2 * DEPTH, 16, 2)
    x_tiles = TensorDescriptor.from_tensor(x, [ROWS.value, DEPTH], layout)
    w_tiles = TensorDescriptor.from_tensor(w.view(leaves * n, k), [COLUMNS.value, DEPTH], layout)
    blocks = form.roots * triton.cdiv(m, variant.rows) * triton.cdiv(n, variant.columns)
    fold_by_trades[(min(sms, blocks),)](
        x_tiles, w_tiles, y, m, n, form.roots, k // DEPTH,
        BK=DEPTH, GROUPS=form.groups, PARTS=form.parts, PAIR=form.pair,
        EVEN=n % variant.columns == 0, STAGES=variant.stages,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
