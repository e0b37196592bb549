"""Products of the gated delta rule in Gluon, transposed: columns of values stand on the M side.

A product's result then lies where the next one wants its left operand, in registers. A matrix
instruction's two operands may be exchanged, so bits are those of `products.py`, whose left operands
are right ones here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

BLOCK = gl.constexpr(16)
_INFINITY = gl.constexpr(0x7F800000)


@gluon.constexpr_function
def small_layout(warps):
    """Columns and a block's rows [16 * warps, 16], as mma.sync has its sums."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def left_of(layout):
    """The layout of the left operand of products whose sums have this layout."""
    return gl.DotOperandLayout(0, layout, 2)


@gluon.constexpr_function
def right_of(layout):
    """The layout of the right operand of products whose sums have this layout."""
    return gl.DotOperandLayout(1, layout, 2)


@gluon.jit
def terms(x):
    """The two bf16 terms of fp32 x, in pairs.

    One by one, rounding takes 8 times as long; and a pair that Triton makes is taken apart again.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 first, second;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 first, $0, 16;
            and.b32 second, $0, 0xffff0000;
            sub.rn.f32 first, $2, first;
            sub.rn.f32 second, $3, second;
            cvt.rn.bf16x2.f32 $1, second, first;
        }""",
        "=&r,=r,r,r",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def left_terms(x, LAYOUT: gl.constexpr):
    """The terms of x as the left operand."""
    high, low = terms(x)
    high = gl.convert_layout(high, left_of(LAYOUT), assert_trivial=True)
    return high, gl.convert_layout(low, left_of(LAYOUT), assert_trivial=True)


@gluon.jit
def add_terms(x, weights, chains):
    """Three chains go on by fp32 weights times rows x, of both the terms (high, low)."""
    high, low = x
    weights_high, weights_low = weights
    total, of_weights, of_rows = chains
    of_weights = mma_v2(high, weights_low, of_weights)
    of_rows = mma_v2(low, weights_high, of_rows)
    return mma_v2(high, weights_high, total), of_weights, of_rows


@gluon.jit
def sum_of(chains):
    """What the chains of `add_terms` come to."""
    total, of_weights, of_rows = chains
    return (of_weights + of_rows) + total


@gluon.jit
def below(x, weights, visible, none, LAYOUT: gl.constexpr):
    """Weights, in terms, times a block's rows x [C, 16]; visible: 1 for rows that a row reads.

    A column of x that is not finite in such a row is NaN.
    """
    finite = (gl.cast(x, gl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY
    flags = gl.where(finite, 0.0, 1.0).to(gl.bfloat16)
    flags = gl.convert_layout(flags, left_of(LAYOUT), assert_trivial=True)
    wrong = mma_v2(flags, visible, none)
    known = left_terms(gl.where(finite, x, 0.0), LAYOUT)
    total = sum_of(add_terms(known, weights, (none, none, none)))
    return gl.where(wrong > 0.0, float("nan"), total)


@gluon.jit
def lower_triangle(LAYOUT: gl.constexpr):
    """Which rows of a block a row reads, those up to itself: [16, 16], a right operand."""
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    reader = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    lower = gl.where(row[:, None] <= reader[None, :], 1.0, 0.0).to(gl.bfloat16)
    return gl.convert_layout(lower, right_of(LAYOUT))


@gluon.jit
def with_one_more(values, value):
    """A tuple of values and one more."""
    return values + (value,)  # noqa: RUF005, Triton unpacks no tuple inside another
