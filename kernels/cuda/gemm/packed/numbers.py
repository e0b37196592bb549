"""Codes in registers become numbers, where the matrix instruction wants its operand; or in memory.

    codes int32 in the order of `inputs/ordered.py`, by blocks of GROUPS * 64 weight rows; scales
    [L, K / group, N / SCALE_ROWS] as stored, zeros uint8 [L, K / group, N] where a form has them

Every warpgroup has 64 weight rows, and a thread its own codes, so nothing moves between threads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.gemm.packed import recipes
from tpdet.kernels.cuda.launch.dependent import await_earlier

UNIT = gl.constexpr(64)  # rows of a warpgroup, and columns of the codes that lie together
LINE_WORDS = gl.constexpr(32)  # a swizzled line of shared memory


class NumbersForm(NamedTuple):
    """What numbers are made for; products' forms have the same names.

    RECIPE: a number of `recipes`; BITS: of a code. ROWS: of x in a tile of the product; GROUPS:
    warpgroups, of 64 weight rows each; DEPTH: columns. SCALE_GROUP: columns that share a scale;
    SCALE_ROWS: weight rows that do.
    """

    RECIPE: int
    BITS: int
    ROWS: int
    GROUPS: int
    DEPTH: int
    SCALE_GROUP: int
    SCALE_ROWS: int


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


@gluon.jit
def ordered_words(codes, FORM: gl.constexpr):
    """Codes [GROUPS, lines, 32] -> words [64 * GROUPS, any], in the order of rows and columns."""
    ROWS: gl.constexpr = 64 * FORM.GROUPS
    PASSES: gl.constexpr = codes.shape[1] // 16
    words = codes.reshape([FORM.GROUPS, PASSES, 4, 8, 4, 2, 2])
    return words.permute([0, 2, 6, 3, 1, 5, 4]).reshape([ROWS, 8 * PASSES])


@gluon.jit
def beside_scales(words, scales, FORM: gl.constexpr):
    """Words [64 * GROUPS, any] and scale words [64 * GROUPS, S], beside each other."""
    ROWS: gl.constexpr = words.shape[0]
    S: gl.constexpr = scales.shape[1]
    WORDS: gl.constexpr = words.shape[1] // S
    LAYOUT: gl.constexpr = word_layout(FORM.GROUPS, S, WORDS)
    words = gl.convert_layout(words.reshape([ROWS, S, WORDS]), LAYOUT, assert_trivial=True)
    scales = gl.convert_layout(scales, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    return gl.broadcast(words, gl.expand_dims(scales, 2))


@gluon.jit
def in_fours(a, b, c, d, FORM: gl.constexpr):
    """Columns 0, 1, 8 and 9 of each 16, as recipes give them -> weight [64 * GROUPS, any]."""
    ROWS: gl.constexpr = a.shape[0]
    WORDS: gl.constexpr = a.shape[1] * a.shape[2]
    values = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, WORDS // 4, 4, 2, 2])
    values = values.permute([0, 1, 3, 2, 4]).reshape([ROWS, 4 * WORDS])
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(FORM.GROUPS, FORM.ROWS), 2)
    return gl.convert_layout(values, LAYOUT, assert_trivial=True)


@gluon.jit
def numbers(codes, scales, FORM: gl.constexpr):
    """Codes [GROUPS, lines, 32] and scale words [64 * GROUPS, S] -> weight [64 * GROUPS, DEPTH]."""
    ROWS: gl.constexpr = 64 * FORM.GROUPS
    VALUES: gl.constexpr = 32 // FORM.BITS  # of a word
    WORDS: gl.constexpr = FORM.DEPTH // VALUES
    words, scales = beside_scales(ordered_words(codes, FORM), scales, FORM)
    if FORM.BITS == 8:
        a, b, c, d = recipes.four(words, scales, FORM.RECIPE, 0)
        weight = in_fours(a, b, c, d, FORM)
    else:
        a, b, c, d, e, f, g, h = recipes.eight(words, scales, FORM.RECIPE)
        low = gl.join(gl.join(a, e), gl.join(c, g))
        high = gl.join(gl.join(b, f), gl.join(d, h))
        values = gl.join(low, high).reshape([ROWS, WORDS // 4, 4, 2, 2, 2])
        values = values.permute([0, 1, 3, 4, 2, 5]).reshape([ROWS, FORM.DEPTH])
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(FORM.GROUPS, FORM.ROWS), 2)
        weight = gl.convert_layout(values, LAYOUT, assert_trivial=True)
    return weight


@gluon.jit
def half_of(pairs, SECOND: gl.constexpr):
    """The first or second half of the columns [ROWS, any]."""
    ROWS: gl.constexpr = pairs.shape[0]
    WIDE: gl.constexpr = pairs.shape[1]
    first, second = pairs.reshape([ROWS, 2, WIDE // 2]).permute([0, 2, 1]).split()
    return second if SECOND else first


@gluon.jit
def part_numbers(words, scales, PART: gl.constexpr, FORM: gl.constexpr):
    """16 columns of the weight, of the four parts of 64.

    words: of the pass that has them, 32 columns of 8 bits or 64 of 4; scales: words of all 64.
    """
    words = half_of(words, PART % 2 if FORM.BITS == 8 else PART // 2)
    if scales.shape[1] == 2:
        scales = half_of(scales, PART // 2)
    words, scales = beside_scales(words, scales, FORM)
    HALF: gl.constexpr = 0 if FORM.BITS == 8 else PART % 2
    a, b, c, d = recipes.four(words, scales, FORM.RECIPE, HALF)
    return in_fours(a, b, c, d, FORM)


@gluon.jit(do_not_specialize=["blocks"])
def unpacked_weight(
    codes, scales, zeros, out, n, k, blocks, FORM: gl.constexpr, DEPENDENT: gl.constexpr
):
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
    word = gl.arange(0, LINE_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lines = k // FORM.DEPTH * LINES
    first = gl.program_id(0).to(gl.int64) * lines + gl.program_id(1) * LINES
    there = codes + first * LINE_WORDS
    packed = gl.load(there + line[None, :, None] * LINE_WORDS + word[None, None, :])
    # 2. scales
    groups = k // FORM.SCALE_GROUP
    across = blocks * UNIT // FORM.SCALE_ROWS
    BY_ROW: gl.constexpr = gl.SliceLayout(2, word_layout(1, S, WORDS // S))
    row = column + gl.arange(0, UNIT, layout=gl.SliceLayout(1, BY_ROW))
    group = depth // FORM.SCALE_GROUP + gl.arange(0, S, layout=gl.SliceLayout(0, BY_ROW))
    address = (leaf * groups + group)[None, :] * across + row[:, None] // FORM.SCALE_ROWS
    words = recipes.scale_words(gl.load(scales + address), FORM.RECIPE)
    if recipes.zeroed(FORM.RECIPE):
        words = recipes.with_zeros(words, gl.load(zeros + address))
    # 3. numbers, stored along K
    values = numbers(packed, words, FORM)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(values, OUT)
    rows = column + gl.arange(0, UNIT, layout=gl.SliceLayout(1, OUT))
    columns = depth + gl.arange(0, FORM.DEPTH, layout=gl.SliceLayout(0, OUT))
    first_value = (leaf * n + rows).to(gl.int64)[:, None] * k + columns[None, :]
    gl.store(out + first_value, values, mask=(rows < n)[:, None])
