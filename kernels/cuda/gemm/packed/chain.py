"""One chain over K whose weight is unpacked in registers, on Hopper: x W^T of codes and scales.

    y[l, m, n] = round(sum over k of x[m, l * K + k] * w[l, n, k] + bias[n])
    w          as `inputs/packed.py` says, bit for bit: the product is the dense one's

    M, N, K   rows of x, weight rows, width of a leaf; L leaves
    x [M, L * K] bf16 by blocks [ROWS, DEPTH]; codes int32 in the order of `inputs/ordered.py`, by
    blocks of GROUPS * 64 weight rows; scales [L, K / group, N / SCALE_ROWS] as stored;
    y [L, M, N] bf16 or fp32

The weight stands on the M side of `wgmma`, in registers: every warpgroup has 64 weight rows, and
reads its own codes by 16 bytes. A scale is a word of 32 bits in shared memory. While a step's codes
become numbers, the products of the step before run.
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

from tpdet.kernels.cuda.gemm.packed import recipes
from tpdet.kernels.cuda.gemm.packed.numbers import (
    LINE_WORDS,
    UNIT,
    code_layout,
    numbers,
    product_layout,
    word_layout,
)
from tpdet.kernels.cuda.gemm.variants.gated import join
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import (
    copy_tile,
    init_barriers,
    limit_registers,
    reinterpreted,
    release,
    wait_free,
)
from tpdet.kernels.inputs.gated import GROUP

_GROUP = gl.constexpr(GROUP)
_MINUS_ZERO = gl.constexpr(-(2**31))  # the bits of -0.0, to which a first term adds unchanged
DENSE, IN_BLOCKS, OF_STEP = map(gl.constexpr, range(3))
"""Rows of x: of a dense product; of blocks, each by its expert (`experts/sorted_tokens.py`); of the
step, which all blocks read."""


class PackedForm(NamedTuple):
    """What the kernel is compiled for.

    RECIPE: a number of `recipes`; BITS: of a code. ROWS: of x in a tile; GROUPS: warpgroups,
    of 64 weight rows each; DEPTH, STAGES: of a step. SCALE_GROUP: columns that share a scale;
    SCALE_ROWS: weight rows that do; SCALES: of a tile along K, a power of two or more than K has.
    GATED: the number of an activation. ROOT: the form of what a program folds (`RootShape`).
    ODD: whether a leaf is an odd number of steps. EXPERTS: `DENSE`, `IN_BLOCKS` or `OF_STEP`.
    PROGRAMS: of a multiprocessor, for which a warp of their own copies; 0: none.
    """

    RECIPE: int
    BITS: int
    ROWS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    SCALE_GROUP: int
    SCALE_ROWS: int
    SCALES: int
    BIAS: bool
    GATED: int
    ROOT: RootShape
    ODD: bool
    EXPERTS: int
    PROGRAMS: int = 0


class PackedStream(NamedTuple):
    """A program's shared memory, and what is copied there."""

    codes: Any
    x: Any
    kept: Any
    full: Any
    free: Any
    code_tiles: Any
    x_tiles: Any


class PackedTilePlace(NamedTuple):
    """A tile: its first block of codes, blocks and steps of a leaf, first row and column of x."""

    block: Any
    blocks: Any
    row: Any
    column: Any
    steps: Any


class PackedOutput(NamedTuple):
    """Where a tile's sums go and its scales are: unit of y, first leaf, group of 64 weight rows."""

    y: Any
    bias: Any
    scales: Any
    zeros: Any
    unit: Any
    first: Any
    group: Any
    row: Any
    m: Any
    n: Any


@gluon.constexpr_function
def registers_of(programs, warps):
    """Registers of a thread at the launch, and of the warp that copies."""
    return 65536 // (programs * 32 * (warps + 4)) // 8 * 8, 40 if programs < 3 else 24


@gluon.constexpr_function
def scale_layout(rows, warps):
    """Scales [any, rows] as they are loaded from memory, rows first."""
    wide = min(rows, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [warps, 1], [1, 0])


@gluon.jit
def keep_scales(kept, scales, zeros, column, groups, across, FORM: gl.constexpr):
    """Scales of a tile, with zero points, as words in shared memory [steps, 64 * GROUPS, S]."""
    ROWS: gl.constexpr = 64 * FORM.GROUPS
    STEPS: gl.constexpr = kept.shape[0]
    S: gl.constexpr = kept.shape[2]
    LAYOUT: gl.constexpr = scale_layout(ROWS, 4 * FORM.GROUPS)
    group = gl.arange(0, STEPS * S, layout=gl.SliceLayout(1, LAYOUT))
    row = (column + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))) // FORM.SCALE_ROWS
    inside = (group < groups)[:, None] & (row < across)[None, :]
    address = group[:, None] * across + row[None, :]
    words = recipes.scale_words(gl.load(scales + address, mask=inside, other=0), FORM.RECIPE)
    if recipes.zeroed(FORM.RECIPE):
        words = recipes.with_zeros(words, gl.load(zeros + address, mask=inside, other=0))
    words = words.reshape([STEPS, S, ROWS]).permute([0, 2, 1]).reshape([STEPS, ROWS * S])
    reinterpreted(kept, gl.int32, [STEPS, ROWS * S], kept.layout).store(words)


@gluon.jit
def ask(stream, spot, step, FORM: gl.constexpr):
    """Copy the operands of a step into its slot, if there is such a step."""
    CODE_LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    BYTES: gl.constexpr = FORM.GROUPS * CODE_LINES * 128 + FORM.ROWS * FORM.DEPTH * 2
    CUT: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    if step < CUT * spot.steps:
        slot = step % FORM.STAGES
        barrier = stream.full.index(slot)
        block = spot.block
        line = step * CODE_LINES
        if CUT > 1:
            leaf = step // spot.steps
            block += leaf * spot.blocks
            line = (step - leaf * spot.steps) * CODE_LINES
        mbarrier.expect(barrier, BYTES)
        copy_tile(stream.code_tiles, [block, line, 0], barrier, stream.codes.index(slot))
        column = spot.column + step * FORM.DEPTH
        copy_tile(stream.x_tiles, [spot.row, column], barrier, stream.x.index(slot))


@gluon.jit
def give_back(stream, spot, step, FORM: gl.constexpr):
    """The slot of a step is free: a later step has it."""
    if FORM.PROGRAMS:
        release(stream.free, step)
    else:
        tl.debug_barrier()
        ask(stream, spot, step + FORM.STAGES, FORM)


@gluon.jit
def copy_steps(stream, spot, FORM: gl.constexpr):
    """The copying warp: all steps of all leaves of the program."""
    CUT: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    for step in range(CUT * spot.steps):
        wait_free(stream.free, step)
        ask(stream, spot, step, FORM)


@gluon.jit
def unpacked(stream, step, FORM: gl.constexpr):
    """The weight of a step, once its codes have arrived."""
    S: gl.constexpr = stream.kept.shape[2]
    SPAN: gl.constexpr = FORM.SCALE_GROUP // FORM.DEPTH if FORM.DEPTH < FORM.SCALE_GROUP else 1
    PASSES: gl.constexpr = FORM.DEPTH * FORM.BITS // 256
    WORDS: gl.constexpr = FORM.DEPTH * FORM.BITS // 32
    BY_ROW: gl.constexpr = gl.SliceLayout(2, word_layout(FORM.GROUPS, S, WORDS // S))
    slot = step % FORM.STAGES
    mbarrier.wait(stream.full.index(slot), step // FORM.STAGES & 1)
    packed = stream.codes.index(slot).load(code_layout(FORM.GROUPS, PASSES))
    return numbers(packed, stream.kept.index(step // SPAN).load(BY_ROW), FORM)


@gluon.jit
def added(weight, x, step, total):
    """total + the product of a step, which is on its way; that of the step before has ended."""
    narrow = x.index(step % x.shape[0]).permute((1, 0))
    total = warpgroup_mma(weight, narrow, total, is_async=True)
    return warpgroup_mma_wait(1, deps=(total,))


@gluon.jit
def leaf_chain(stream, spot, begin, FORM: gl.constexpr):
    """The chain over a leaf's steps, from the program's step `begin` on."""
    HEIGHT: gl.constexpr = 64 * FORM.GROUPS
    ROWS: gl.constexpr = FORM.ROWS
    PRODUCT: gl.constexpr = product_layout(FORM.GROUPS, FORM.ROWS)
    last = begin + spot.steps - 1
    total = gl.zeros((HEIGHT, ROWS), gl.float32, layout=PRODUCT)
    even = unpacked(stream, begin, FORM)
    total = added(even, stream.x, begin, total)
    for pair in range((spot.steps - 1) // 2):
        step = begin + 2 * pair
        odd = unpacked(stream, step + 1, FORM)
        total = added(odd, stream.x, step + 1, total)
        give_back(stream, spot, step, FORM)
        even = unpacked(stream, step + 2, FORM)
        total = added(even, stream.x, step + 2, total)
        give_back(stream, spot, step + 1, FORM)
    if not FORM.ODD:
        odd = unpacked(stream, last, FORM)
        total = added(odd, stream.x, last, total)
    total = warpgroup_mma_wait(0, deps=(total,))
    if FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR > 1:
        if not FORM.ODD:
            give_back(stream, spot, last - 1, FORM)
        give_back(stream, spot, last, FORM)
    return total


@gluon.jit
def folded_leaves(stream, spot, FORM: gl.constexpr):
    """The leaves of a program, in the order of their root: as `leaf_fold.py` adds them up."""
    GROUPS: gl.constexpr = FORM.ROOT.GROUPS
    PARTS: gl.constexpr = FORM.ROOT.PARTS
    PAIR: gl.constexpr = FORM.ROOT.PAIR
    steps = spot.steps
    if GROUPS * PARTS * PAIR == 1:
        total = leaf_chain(stream, spot, 0, FORM)
    else:
        HEIGHT: gl.constexpr = 64 * FORM.GROUPS
        ROWS: gl.constexpr = FORM.ROWS
        PRODUCT: gl.constexpr = product_layout(FORM.GROUPS, FORM.ROWS)
        none = gl.full((HEIGHT, ROWS), _MINUS_ZERO, gl.int32, layout=PRODUCT)
        total = gl.cast(none, gl.float32, bitcast=True)
        for group in range(GROUPS):
            begin = group * (PARTS * PAIR) * steps
            if PARTS == 1:
                if PAIR == 1:
                    total += leaf_chain(stream, spot, begin, FORM)
                else:
                    left = leaf_chain(stream, spot, begin, FORM)
                    total += left + leaf_chain(stream, spot, begin + steps, FORM)
            else:
                left = leaf_chain(stream, spot, begin, FORM)
                term = left + leaf_chain(stream, spot, begin + steps, FORM)
                left = leaf_chain(stream, spot, begin + 2 * steps, FORM)
                total += term + (left + leaf_chain(stream, spot, begin + 3 * steps, FORM))
    return total


@gluon.jit
def finished(total, y, bias, row, column, m, n, FORM: gl.constexpr):
    """Bias, gates, and the store of a tile [64 * GROUPS, ROWS], clipped at M and N."""
    HEIGHT: gl.constexpr = 64 * FORM.GROUPS
    LAYOUT: gl.constexpr = product_layout(FORM.GROUPS, FORM.ROWS)
    if FORM.BIAS:
        biased = column + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LAYOUT))
        total = total + gl.load(bias + biased, mask=biased < n, other=0.0).to(gl.float32)[:, None]
    if FORM.GATED:
        PAIRS: gl.constexpr = HEIGHT // (2 * _GROUP)
        apart = total.reshape([PAIRS, 2, _GROUP, FORM.ROWS]).permute([0, 2, 3, 1])
        gate, up = apart.split()
        total = join(gate, up, FORM.GATED).reshape([HEIGHT // 2, FORM.ROWS])
        column = column // 2
        n = n // 2
    ACROSS: gl.constexpr = total.shape[0]
    VECTOR: gl.constexpr = 4
    WIDE: gl.constexpr = 8
    OUT: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // WIDE, WIDE], [4 * FORM.GROUPS, 1], [1, 0]
    )
    value = gl.convert_layout(total.to(y.dtype.element_ty).permute([1, 0]), OUT)
    rows = row + gl.arange(0, FORM.ROWS, layout=gl.SliceLayout(1, OUT))
    columns = column + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, OUT))
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    gl.store(y + rows.to(gl.int64)[:, None] * n + columns[None, :], value, mask=inside)


@gluon.jit
def one_tile(stream, spot, result, FORM: gl.constexpr):
    """All scales of a tile, its chains over K, and its store."""
    CUT: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    groups = spot.steps * FORM.DEPTH // FORM.SCALE_GROUP
    across = gl.cdiv(result.n, UNIT) * UNIT // FORM.SCALE_ROWS
    begin = result.first * groups * across
    column = result.group * UNIT
    own = result.scales + begin, result.zeros + begin
    keep_scales(stream.kept, *own, column, CUT * groups, across, FORM)
    tl.debug_barrier()
    total = folded_leaves(stream, spot, FORM)
    y = result.y + result.unit * result.m * result.n
    finished(total, y, result.bias, result.row, column, result.m, result.n, FORM)


@gluon.jit(do_not_specialize=["m", "steps", "blocks"])
def packed_chain(
    code_tiles,
    x_tiles,
    scales,
    zeros,
    y,
    bias,
    expert_ids,
    m,
    n,
    steps,
    blocks,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One tile of one leaf, or of a root over CUT neighbours (program axis 1), `steps` of K each.

    code_tiles [L * blocks, K / 64 * lines, 32] in blocks [GROUPS, lines of DEPTH, 32]; blocks:
    groups of 64 weight rows of a leaf. Of experts, a leaf each, m is rows of y, bias [L, N], and
    expert_ids int32 has the count of blocks of rows and the expert of each. num_warps = 4 * GROUPS.
    """
    await_earlier(DEPENDENT)
    S: gl.constexpr = FORM.DEPTH // FORM.SCALE_GROUP if FORM.DEPTH > FORM.SCALE_GROUP else 1
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    CUT: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    # 1. the tile, and its memory
    if FORM.EXPERTS == DENSE:
        tall = gl.cdiv(m, FORM.ROWS)
        row = gl.program_id(0) % tall * FORM.ROWS
        group = gl.program_id(0) // tall * FORM.GROUPS
        unit = gl.program_id(1)
        first = unit * CUT
        depth = first * steps * FORM.DEPTH
        row_of_x = row
    else:
        wide = gl.cdiv(blocks, FORM.GROUPS)
        of_rows = gl.program_id(0) // wide
        first = gl.load(expert_ids + (1 + of_rows))
        if of_rows >= gl.load(expert_ids + 0):
            return
        row = of_rows * FORM.ROWS
        group = gl.program_id(0) % wide * FORM.GROUPS
        unit = 0
        depth = 0
        row_of_x = row if FORM.EXPERTS == IN_BLOCKS else 0
        bias += first * n
    codes = gl.allocate_shared_memory(
        gl.int32, [FORM.STAGES, FORM.GROUPS, LINES, LINE_WORDS], code_tiles.layout
    )
    x = gl.allocate_shared_memory(
        x_tiles.dtype, [FORM.STAGES, FORM.ROWS, FORM.DEPTH], x_tiles.layout
    )
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.int32, [FORM.SCALES // S, UNIT * FORM.GROUPS, S], KEPT)
    full = gl.allocate_shared_memory(gl.int64, [FORM.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [FORM.STAGES, 1], mbarrier.MBarrierLayout())
    init_barriers((full,), (free,), 1)
    tl.debug_barrier()
    # 2. the first steps, and all scales
    stream = PackedStream(codes, x, kept, full, free, code_tiles, x_tiles)
    spot = PackedTilePlace(first * blocks + group, blocks, row_of_x, depth, steps)
    result = PackedOutput(y, bias, scales, zeros, unit, first, group, row, m, n)
    if FORM.PROGRAMS:
        SHARES: gl.constexpr = registers_of(FORM.PROGRAMS, 4 * FORM.GROUPS)
        LAUNCHED: gl.constexpr = SHARES[0]
        COPYING: gl.constexpr = SHARES[1]
        limit_registers(LAUNCHED)
        gl.warp_specialize(
            [(one_tile, (stream, spot, result, FORM)), (copy_steps, (stream, spot, FORM))],
            [1],
            [COPYING],
        )
    else:
        STAGES: gl.constexpr = FORM.STAGES
        for early in gl.static_range(STAGES):
            ask(stream, spot, early, FORM)
        one_tile(stream, spot, result, FORM)
