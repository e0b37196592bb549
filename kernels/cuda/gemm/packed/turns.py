"""One chain over K by two warpgroups that take turns, for products of few tiles (Hopper).

    x, w, y    as in `chain.py`, of which each leaf is a chain of its own

Where there are fewer tiles of 64 weight rows than multiprocessors, a product takes as long as one
chain, and most of a step is unpacking. Here two warpgroups unpack, one the even steps, the other
the odd ones, and the sums go from one to the other through shared memory: only the products of
steps wait for each other. A third warp copies.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.packed.chain import (
    PackedOutput,
    PackedStream,
    PackedTilePlace,
    copy_steps,
    finished,
    keep_scales,
    unpacked,
)
from tpdet.kernels.cuda.gemm.packed.numbers import LINE_WORDS, UNIT, product_layout
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import (
    allocate_barriers,
    init_barriers,
    limit_registers,
    release,
)

_WARPS = gl.constexpr(12)  # of a program: four of each warpgroup, four that are one's that copies


class Hands(NamedTuple):
    """Sums on their way to each warpgroup, [ROWS, 64] fp32 in shared memory; full: they are there.

    They are apart, so that Triton puts no barrier between a load and the next store.
    """

    to_even: Any
    to_odd: Any
    full: Any


@gluon.constexpr_function
def turn_registers(programs, warps):
    """Registers of a thread at the launch, of one that takes turns, of one that copies."""
    launched = 65536 // (programs * 32 * warps) // 8 * 8
    copying = launched if programs == 1 else 24
    return launched, (launched * warps - 4 * copying) // 8 // 8 * 8, copying


@gluon.jit
def _take_turns(turn: gl.constexpr, stream, hands, spot, result, FORM: gl.constexpr):
    """Every second step of a tile, from step `turn` on; who has the last one stores the tile."""
    PRODUCT: gl.constexpr = product_layout(1, FORM.ROWS)
    HEIGHT: gl.constexpr = 64
    ROWS: gl.constexpr = FORM.ROWS
    LAST: gl.constexpr = 0 if FORM.ODD else 1
    # 1. scales; nothing yet is the first one's sum
    groups = spot.steps * FORM.DEPTH // FORM.SCALE_GROUP
    across = gl.cdiv(result.n, UNIT) * UNIT // FORM.SCALE_ROWS
    begin = result.first * groups * across
    column = result.group * UNIT
    own = result.scales + begin, result.zeros + begin
    keep_scales(stream.kept, *own, column, groups, across, FORM)
    total = gl.zeros((HEIGHT, ROWS), gl.float32, layout=PRODUCT)
    if turn == 1:
        _hand_over(hands, 0, total)
    tl.debug_barrier()
    # 2. the steps: numbers, while the other's product runs, then the product
    for step in range(turn, spot.steps, 2):
        weight = unpacked(stream, step, FORM)
        narrow = stream.x.index(step % FORM.STAGES).permute((1, 0))
        mbarrier.wait(hands.full.index(turn), step // 2 & 1)
        total = (hands.to_odd if turn == 1 else hands.to_even).permute((1, 0)).load(PRODUCT)
        total = warpgroup_mma(weight, narrow, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        _hand_over(hands, 1 - turn, total)
        release(stream.free, step)
    # 3. the result
    if turn == LAST:
        y = result.y + result.unit * result.m * result.n
        finished(total, y, result.bias, result.row, column, result.m, result.n, FORM)


@gluon.jit
def _hand_over(hands, other: gl.constexpr, total):
    """A step's sums to the other warpgroup, which waits for them."""
    (hands.to_odd if other == 1 else hands.to_even).permute((1, 0)).store(total)
    tl.debug_barrier()
    mbarrier.arrive(hands.full.index(other), count=1)


@gluon.jit
def _take_even(stream, hands, spot, result, FORM: gl.constexpr):
    _take_turns(0, stream, hands, spot, result, FORM)


@gluon.jit
def _take_odd(stream, hands, spot, result, FORM: gl.constexpr):
    _take_turns(1, stream, hands, spot, result, FORM)


@gluon.jit(do_not_specialize=["m", "steps", "blocks"])
def packed_turns(
    code_tiles,
    x_tiles,
    scales,
    zeros,
    y,
    bias,
    m,
    n,
    steps,
    blocks,
    FORM: gl.constexpr,
    HANDED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One tile [64, ROWS] of one leaf (program axis 1), `steps` of K; as `packed_chain`.

    FORM: a `PackedForm` of one group and one leaf, of PROGRAMS a multiprocessor; HANDED: the layout
    of sums that change hands. num_warps=4.
    """
    await_earlier(DEPENDENT)
    S: gl.constexpr = FORM.DEPTH // FORM.SCALE_GROUP if FORM.DEPTH > FORM.SCALE_GROUP else 1
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    STAGES: gl.constexpr = FORM.STAGES
    # 1. the tile, and its memory; each warpgroup keeps all scales
    tall = gl.cdiv(m, FORM.ROWS)
    row = gl.program_id(0) % tall * FORM.ROWS
    group = gl.program_id(0) // tall
    unit = gl.program_id(1)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, 1, LINES, LINE_WORDS], code_tiles.layout)
    x = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, FORM.ROWS, FORM.DEPTH], x_tiles.layout)
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    even = gl.allocate_shared_memory(gl.int32, [FORM.SCALES // S, UNIT, S], KEPT)
    odd = gl.allocate_shared_memory(gl.int32, [FORM.SCALES // S, UNIT, S], KEPT)
    to_even = gl.allocate_shared_memory(gl.float32, [FORM.ROWS, UNIT], HANDED)
    to_odd = gl.allocate_shared_memory(gl.float32, [FORM.ROWS, UNIT], HANDED)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    handed = allocate_barriers(2)
    init_barriers((full,), (free,), 1)
    init_barriers((), (handed,), 1)
    tl.debug_barrier()
    # 2. two warpgroups, and the warp that copies
    evens = PackedStream(codes, x, even, full, free, code_tiles, x_tiles)
    odds = PackedStream(codes, x, odd, full, free, code_tiles, x_tiles)
    spot = PackedTilePlace(unit * blocks + group, blocks, row, unit * steps * FORM.DEPTH, steps)
    result = PackedOutput(y, bias, scales, zeros, unit, unit, group, row, m, n)
    hands = Hands(to_even, to_odd, handed)
    SHARES: gl.constexpr = turn_registers(FORM.PROGRAMS, _WARPS)
    LAUNCHED: gl.constexpr = SHARES[0]
    TURNING: gl.constexpr = SHARES[1]
    COPYING: gl.constexpr = SHARES[2]
    limit_registers(LAUNCHED)
    gl.warp_specialize(
        [
            (_take_even, (evens, hands, spot, result, FORM)),
            (_take_odd, (odds, hands, spot, result, FORM)),
            (copy_steps, (evens, spot, FORM)),
        ],
        [4, 1],
        [TURNING, COPYING],
    )
