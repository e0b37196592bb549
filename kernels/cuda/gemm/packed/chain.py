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
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.packed import recipes
from tpdet.kernels.cuda.gemm.variants.gated import join
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import copy_tile, reinterpreted
from tpdet.kernels.inputs.gated import GROUP

_GROUP = gl.constexpr(GROUP)
UNIT = gl.constexpr(64)  # rows of a warpgroup, and columns of the codes that lie together
_MINUS_ZERO = gl.constexpr(-(2**31))  # the bits of -0.0, to which a first term adds unchanged
_LINE_WORDS = gl.constexpr(32)  # a swizzled line of shared memory


class PackedForm(NamedTuple):
    """What the kernel is compiled for.

    RECIPE: a number of `recipes`; BITS: of a code. ROWS: of x in a tile; GROUPS: warpgroups,
    of 64 weight rows each; DEPTH, STAGES: of a step. SCALE_GROUP: columns that share a scale;
    SCALE_ROWS: weight rows that do; SCALES: of a tile along K, a power of two or more than K has.
    GATED: the number of an activation. ROOT: the form of what a program folds (`RootShape`).
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


class PackedStream(NamedTuple):
    """A program's shared memory, and what is copied there."""

    codes: Any
    x: Any
    kept: Any
    full: Any
    code_tiles: Any
    x_tiles: Any


class PackedTilePlace(NamedTuple):
    """A tile: its first block of codes, blocks and steps of a leaf, first row and column of x."""

    block: Any
    blocks: Any
    row: Any
    column: Any
    steps: Any


@gluon.constexpr_function
def code_layout(groups, passes):
    """Codes [groups, lines, 32] in registers: a thread has 4 words of each pass."""
    lines = 16 * passes
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 16 << i, 0] for i in range(passes.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    warps = [[0, 4, 0], [0, 8, 0]] + [[1 << i, 0, 0] for i in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, lines, 32])


@gluon.constexpr_function
def word_layout(groups, scales, words):
    """Words [64 * groups, scales, words] as the matrix instruction's rows have them."""
    registers = [[8, 0, 0]]
    registers += [[0, 0, 4 << i] for i in range((words // 4).bit_length() - 1)]
    registers += [[0, 1 << i, 0] for i in range(scales.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range((4 * groups).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64 * groups, scales, words])


@gluon.constexpr_function
def product_layout(groups, rows):
    """The accumulator [64 * groups, rows]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4 * groups, 1], instr_shape=[16, rows, 16]
    )


@gluon.constexpr_function
def scale_layout(scales, rows, warps):
    """Scales [scales, rows] as they are loaded from memory, rows first."""
    wide = min(rows, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [warps, 1], [1, 0])


@gluon.jit
def numbers(codes, scales, FORM: gl.constexpr):
    """Codes [GROUPS, lines, 32] and scale words [64 * GROUPS, S] -> weight [64 * GROUPS, DEPTH]."""
    ROWS: gl.constexpr = 64 * FORM.GROUPS
    VALUES: gl.constexpr = 32 // FORM.BITS  # of a word
    WORDS: gl.constexpr = FORM.DEPTH // VALUES
    PASSES: gl.constexpr = FORM.DEPTH * FORM.BITS // (8 * 32)
    S: gl.constexpr = scales.shape[1]
    # 1. words in the order of rows and columns
    words = codes.reshape([FORM.GROUPS, PASSES, 4, 8, 4, 2, 2])
    words = words.permute([0, 2, 6, 3, 1, 5, 4]).reshape([ROWS, S, WORDS // S])
    words = gl.convert_layout(words, word_layout(FORM.GROUPS, S, WORDS // S), assert_trivial=True)
    scales = gl.expand_dims(scales, 2)
    words, scales = gl.broadcast(words, scales)
    # 2. 4 or 8 numbers of each word, and their places
    if FORM.BITS == 8:
        a, b, c, d = recipes.four(words, scales, FORM.RECIPE)
        values = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, WORDS // 4, 4, 2, 2])
        values = values.permute([0, 1, 3, 2, 4])
    else:
        a, b, c, d, e, f, g, h = recipes.eight(words, scales, FORM.RECIPE)
        low = gl.join(gl.join(a, e), gl.join(c, g))
        high = gl.join(gl.join(b, f), gl.join(d, h))
        values = gl.join(low, high).reshape([ROWS, WORDS // 4, 4, 2, 2, 2])
        values = values.permute([0, 1, 3, 4, 2, 5])
    values = values.reshape([ROWS, FORM.DEPTH])
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(FORM.GROUPS, FORM.ROWS), 2)
    return gl.convert_layout(values, LAYOUT, assert_trivial=True)


@gluon.jit
def keep_scales(kept, scales, column, groups, across, FORM: gl.constexpr):
    """Scales of a tile, as words, into shared memory [steps, 64 * GROUPS, S]."""
    ROWS: gl.constexpr = 64 * FORM.GROUPS
    STEPS: gl.constexpr = kept.shape[0]
    S: gl.constexpr = kept.shape[2]
    LAYOUT: gl.constexpr = scale_layout(STEPS * S, ROWS, 4 * FORM.GROUPS)
    group = gl.arange(0, STEPS * S, layout=gl.SliceLayout(1, LAYOUT))
    row = (column + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))) // FORM.SCALE_ROWS
    inside = (group < groups)[:, None] & (row < across)[None, :]
    loaded = gl.load(scales + group[:, None] * across + row[None, :], mask=inside, other=0)
    words = recipes.scale_words(loaded, FORM.RECIPE)
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
    STAGES: gl.constexpr = FORM.STAGES
    HEIGHT: gl.constexpr = 64 * FORM.GROUPS
    ROWS: gl.constexpr = FORM.ROWS
    PRODUCT: gl.constexpr = product_layout(FORM.GROUPS, FORM.ROWS)
    last = begin + spot.steps - 1
    total = gl.zeros((HEIGHT, ROWS), gl.float32, layout=PRODUCT)
    even = unpacked(stream, begin, FORM)
    total = added(even, stream.x, begin, total)
    for pair in range(spot.steps // 2 - 1):
        step = begin + 2 * pair
        odd = unpacked(stream, step + 1, FORM)
        total = added(odd, stream.x, step + 1, total)
        tl.debug_barrier()
        ask(stream, spot, step + STAGES, FORM)
        even = unpacked(stream, step + 2, FORM)
        total = added(even, stream.x, step + 2, total)
        tl.debug_barrier()
        ask(stream, spot, step + STAGES + 1, FORM)
    odd = unpacked(stream, last, FORM)
    total = added(odd, stream.x, last, total)
    total = warpgroup_mma_wait(0, deps=(total,))
    if FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR > 1:
        tl.debug_barrier()
        ask(stream, spot, last - 1 + STAGES, FORM)
        ask(stream, spot, last + STAGES, FORM)
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


@gluon.jit(do_not_specialize=["m", "steps", "blocks"])
def packed_chain(
    code_tiles,
    x_tiles,
    scales,
    y,
    bias,
    m,
    n,
    steps,
    blocks,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One tile of one leaf, or of a root over CUT neighbours (program axis 1), `steps` of K each.

    code_tiles [L * blocks, K / 64 * lines, 32] in blocks [GROUPS, lines of DEPTH, 32]; blocks:
    groups of 64 weight rows of a leaf. num_warps = 4 * GROUPS.
    """
    await_earlier(DEPENDENT)
    S: gl.constexpr = FORM.DEPTH // FORM.SCALE_GROUP if FORM.DEPTH > FORM.SCALE_GROUP else 1
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    CUT: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    # 1. the tile, and its memory
    tall = gl.cdiv(m, FORM.ROWS)
    row = gl.program_id(0) % tall * FORM.ROWS
    group = gl.program_id(0) // tall * FORM.GROUPS
    unit = gl.program_id(1)
    codes = gl.allocate_shared_memory(
        gl.int32, [FORM.STAGES, FORM.GROUPS, LINES, _LINE_WORDS], code_tiles.layout
    )
    x = gl.allocate_shared_memory(
        x_tiles.dtype, [FORM.STAGES, FORM.ROWS, FORM.DEPTH], x_tiles.layout
    )
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.int32, [FORM.SCALES // S, UNIT * FORM.GROUPS, S], KEPT)
    full = gl.allocate_shared_memory(gl.int64, [FORM.STAGES, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = FORM.STAGES
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    tl.debug_barrier()
    # 2. the first steps, and all scales
    stream = PackedStream(codes, x, kept, full, code_tiles, x_tiles)
    first = unit * CUT
    spot = PackedTilePlace(first * blocks + group, blocks, row, first * steps * FORM.DEPTH, steps)
    for early in gl.static_range(STAGES):
        ask(stream, spot, early, FORM)
    groups = steps * FORM.DEPTH // FORM.SCALE_GROUP
    across = gl.cdiv(n, UNIT) * UNIT // FORM.SCALE_ROWS
    own = scales + first * groups * across
    keep_scales(kept, own, group * UNIT, CUT * groups, across, FORM)
    tl.debug_barrier()
    # 3. the chains over K
    total = folded_leaves(stream, spot, FORM)
    finished(total, y + unit * m * n, bias, row, group * UNIT, m, n, FORM)


@gluon.jit(do_not_specialize=["blocks"])
def unpacked_weight(codes, scales, out, n, k, blocks, FORM: gl.constexpr, DEPENDENT: gl.constexpr):
    """out [L, N, K] = the numbers of a weight: 64 rows and DEPTH columns of a leaf a program.

    Program axis 0: a leaf's block of rows; axis 1: DEPTH columns. num_warps = 4.
    """
    await_earlier(DEPENDENT)
    S: gl.constexpr = FORM.DEPTH // FORM.SCALE_GROUP if FORM.DEPTH > FORM.SCALE_GROUP else 1
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    WORDS: gl.constexpr = FORM.DEPTH * FORM.BITS // 32
    CODES: gl.constexpr = code_layout(1, LINES // 16)
    leaf = gl.program_id(0) // blocks
    column = gl.program_id(0) % blocks * UNIT
    depth = gl.program_id(1) * FORM.DEPTH
    # 1. codes, where each thread has its own
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    word = gl.arange(0, _LINE_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lines = k // FORM.DEPTH * LINES
    first = gl.program_id(0).to(gl.int64) * lines + gl.program_id(1) * LINES
    there = codes + first * _LINE_WORDS
    packed = gl.load(there + line[None, :, None] * _LINE_WORDS + word[None, None, :])
    # 2. scales
    groups = k // FORM.SCALE_GROUP
    across = blocks * UNIT // FORM.SCALE_ROWS
    BY_ROW: gl.constexpr = gl.SliceLayout(2, word_layout(1, S, WORDS // S))
    row = column + gl.arange(0, UNIT, layout=gl.SliceLayout(1, BY_ROW))
    group = depth // FORM.SCALE_GROUP + gl.arange(0, S, layout=gl.SliceLayout(0, BY_ROW))
    own = scales + leaf * groups * across
    loaded = gl.load(own + group[None, :] * across + row[:, None] // FORM.SCALE_ROWS)
    # 3. numbers, stored along K
    values = numbers(packed, recipes.scale_words(loaded, FORM.RECIPE), FORM)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(values, OUT)
    rows = column + gl.arange(0, UNIT, layout=gl.SliceLayout(1, OUT))
    columns = depth + gl.arange(0, FORM.DEPTH, layout=gl.SliceLayout(0, OUT))
    first_value = (leaf * n + rows).to(gl.int64)[:, None] * k + columns[None, :]
    gl.store(out + first_value, values, mask=(rows < n)[:, None])
