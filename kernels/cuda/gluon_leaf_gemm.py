"""Leaves folded inside a program whose warps have trades: one fetches, two groups of four compute.

    y[r] = ((g_0 + g_1) + g_2) + ...,  g = p_0 or p_0 + p_1,  p = l_i or l_i + l_(i+1)

A tile has 128 rows, 64 for each group of warps. The fetching warp keeps a ring of stages full
across leaves and tiles, so that no leaf's start waits for loads, and while one group adds up what a
leaf left, the other's products run. Each leaf is its own fp32 chain from +0 in ascending K; sums
start from -0.0, the identity of addition.

128 columns: a leaf's accumulator is 64 registers a thread; the leaf under way, the leaf it pairs
with and the chain's total stay in registers, and where the order has a fourth level (`tree`) the
finished half rests in y, where every thread reads back what it wrote itself.

256 columns: less traffic through shared memory for the same products, and 128 registers a leaf. Of
the leaf that waits for its pair, the left half of the columns stays in registers and the right half
rests in shared memory; the total rests in y.

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
from tpdet.kernels.cuda.root_form import RootForm

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6
ROWS = gl.constexpr(64)  # of a group of four warps: the height of their instructions
PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def _fetch(x_tiles, w_tiles, x_ring, w_ring, full, free, m, n, roots, steps,
           BN: gl.constexpr, BK: gl.constexpr, LEAVES: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """The fetching warp: all steps of all leaves of all tiles of this program."""
    blocks = gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, BN)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, 2 * ROWS, BN)
        first = tile // blocks * LEAVES
        for leaf in range(first, first + LEAVES):
            for step in range(steps):
                place = at % STAGES
                depth = (leaf * steps + step) * BK
                mbarrier.wait(free.index(place), at // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(place), 2 * ROWS * BK * 2 + BN * BK * 2)
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
def _chain(x_ring, w_ring, full, free, half, at, steps, BN: gl.constexpr, STAGES: gl.constexpr):
    """One leaf of this group's rows [ROWS, BN], from step number `at` of the ring on."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    total = gl.zeros((ROWS, BN), gl.float32, layout=BY_LANE)
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
def _minus_zeros(COLUMNS: gl.constexpr):
    """-0.0 everywhere [ROWS, COLUMNS]: x + -0.0 is x for every x, -0.0 too."""
    BY_LANE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    bits = gl.full((ROWS, COLUMNS), -2147483648, gl.int32, layout=BY_LANE)
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def _halves(value, COLUMNS: gl.constexpr):
    """value [ROWS, COLUMNS] as its left and right columns; a thread's values stay its own."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    apart = value.reshape((ROWS, 2, COLUMNS // 2)).permute((0, 2, 1))
    left, right = gl.split(apart)
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def _put(y, root, row, column, value, m, n, more, MORE: gl.constexpr, COLUMNS: gl.constexpr,
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
def _quarters(value, COLUMNS: gl.constexpr):
    """value [ROWS, COLUMNS] as four tensors of its columns."""
    left, right = _halves(value, COLUMNS)
    a, b = _halves(left, COLUMNS // 2)
    c, d = _halves(right, COLUMNS // 2)
    return a, b, c, d


@gluon.jit
def _fold_square(x_ring, w_ring, full, free, y, half, at, steps, root, row, column, m, n,
                 BN: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
                 EVEN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One tile of 128 columns."""
    TURNS: gl.constexpr = 1 if PARTS == 1 else GROUPS
    CHAINED: gl.constexpr = GROUPS if PARTS == 1 else PARTS
    for turn in range(TURNS):
        total = _minus_zeros(BN)
        for _ in range(CHAINED):
            term = _chain(x_ring, w_ring, full, free, half, at, steps, BN, STAGES)
            at += steps
            if PAIR == 2:
                term += _chain(x_ring, w_ring, full, free, half, at, steps, BN, STAGES)
                at += steps
            total += term
        _put(y, root, row, column, total, m, n, turn > 0, TURNS > 1, BN, EVEN)


@gluon.jit
def _fold_wide(x_ring, w_ring, full, free, parked, y, half, at, steps, root, row, column, m, n,
               BN: gl.constexpr, GROUPS: gl.constexpr, PAIR: gl.constexpr, EVEN: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """One tile of 256 columns; parked [2, ROWS, BN / 4] in shared memory is this group's.

    One loop holds the products of all leaves: with two, ptxas finds no registers for the second.
    """
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 4, 16])
    Q: gl.constexpr = BN // 4
    left = _minus_zeros(Q)
    right = _minus_zeros(Q)
    for leaf in range(GROUPS * PAIR):
        term = _chain(x_ring, w_ring, full, free, half, at, steps, BN, STAGES)
        at += steps
        a, b, c, d = _quarters(term, BN)
        if PAIR == 2 and leaf % 2 == 0:
            left = a
            right = b
            parked.index(2 * half).store(c)
            parked.index(2 * half + 1).store(d)
        else:
            more = leaf >= PAIR
            if PAIR == 2:
                a = left + a
                b = right + b
            _put(y, root, row, column, a, m, n, more, GROUPS > 1, Q, EVEN)
            _put(y, root, row, column + Q, b, m, n, more, GROUPS > 1, Q, EVEN)
            if PAIR == 2:
                c = parked.index(2 * half).load(QUARTER) + c
            _put(y, root, row, column + 2 * Q, c, m, n, more, GROUPS > 1, Q, EVEN)
            if PAIR == 2:
                d = parked.index(2 * half + 1).load(QUARTER) + d
            _put(y, root, row, column + 3 * Q, d, m, n, more, GROUPS > 1, Q, EVEN)


@gluon.jit
def _consume(x_ring, w_ring, full, free, parked, y, half, m, n, roots, steps,
             BN: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
             EVEN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: its 64 rows of all tiles of this program."""
    blocks = gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, BN)
    at = 0
    for tile in range(gl.program_id(0), blocks * roots, gl.num_programs(0)):
        row, column = tile_origin(tile % blocks, m, n, 2 * ROWS, BN)
        row += half * ROWS
        root = tile // blocks
        if BN == 256:
            _fold_wide(x_ring, w_ring, full, free, parked, y, half, at, steps, root, row, column,
                       m, n, BN, GROUPS, PAIR, EVEN, STAGES)  # fmt: skip
        else:
            _fold_square(x_ring, w_ring, full, free, y, half, at, steps, root, row, column,
                         m, n, BN, GROUPS, PARTS, PAIR, EVEN, STAGES)  # fmt: skip
        at += GROUPS * PARTS * PAIR * steps


@gluon.jit(do_not_specialize=["m", "roots", "steps"])
def fold_by_trades(
    x_tiles, w_tiles, y, m, n, roots, steps,
    BN: gl.constexpr, BK: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr,
    PAIR: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles [128, BN] of all roots of y [roots, m, n] fp32, a leaf `steps` = k / BK steps.

    x_tiles: x [m, L * k] in blocks [64, BK]; w_tiles: the weight [L * n, k] in blocks [BN, BK];
    L = roots * GROUPS * PARTS * PAIR. num_warps=4.
    """
    LEAVES: gl.constexpr = GROUPS * PARTS * PAIR
    RING: gl.constexpr = x_tiles.layout
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [2 * STAGES, ROWS, BK], RING)
    w_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BN, BK], RING)
    PARKING: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    SIZE: gl.constexpr = BN // 4
    parked = gl.allocate_shared_memory(gl.float32, [4, ROWS, SIZE], PARKING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (x_ring, w_ring, full, free, parked, y, 0, m, n, roots, steps,
                        BN, GROUPS, PARTS, PAIR, EVEN, STAGES)),
            (_consume, (x_ring, w_ring, full, free, parked, y, 1, m, n, roots, steps,
                        BN, GROUPS, PARTS, PAIR, EVEN, STAGES)),
            (_fetch, (x_tiles, w_tiles, x_ring, w_ring, full, free, m, n, roots, steps,
                      BN, BK, LEAVES, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def gluon_fits(form: RootForm, n: int, k: int, variant: Variant) -> bool:
    """Whether `run_gluon_fold` folds leaves of n columns and width k by this tile."""
    if variant.rows != 2 * ROWS.value or k % variant.depth or variant.depth not in (32, 64):
        return False
    if variant.columns == 256:
        return form.parts == 1 and n % 256 == 0
    return variant.columns == 128


def run_gluon_fold(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, variant: Variant, sms: int
) -> None:
    """x [M, L * K], w [L, N, K] contiguous -> y [at least form.roots, M, N] fp32, roots filled.

    Of the variant, rows (128), columns (128 or 256), depth and stages count. Raises ValueError
    where it does not fit.
    """
    leaves, n, k = w.shape
    if not gluon_fits(form, n, k, variant):
        raise ValueError(f"{form} of {n} columns, leaves of {k}: no kernel for {variant}")
    m = x.shape[0]
    layout = gl.NVMMASharedLayout(2 * variant.depth, 16, 2)
    x_tiles = TensorDescriptor.from_tensor(x, [ROWS.value, variant.depth], layout)
    w_tiles = TensorDescriptor.from_tensor(
        w.view(leaves * n, k), [variant.columns, variant.depth], layout
    )
    blocks = form.roots * triton.cdiv(m, variant.rows) * triton.cdiv(n, variant.columns)
    fold_by_trades[(min(sms, blocks),)](
        x_tiles, w_tiles, y, m, n, form.roots, k // variant.depth,
        BN=variant.columns, BK=variant.depth, GROUPS=form.groups, PARTS=form.parts, PAIR=form.pair,
        EVEN=n % variant.columns == 0, STAGES=variant.stages,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
