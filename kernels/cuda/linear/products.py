"""Products of the gated delta rule: fp32 operands in two bf16 terms, each a chain from +0.

    x = high + low,  high = bf16(x),  low = bf16(x - high)
    left @ right = (low high' + high low') + high high'

Without two terms (models in fp16 and fp32) operands are fp32, in one chain of fma.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.ended import ended

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def high_and_low(x, TWO: tl.constexpr):
    """The terms of fp32 x; x twice without two terms.

    high is rounded by integers: the instruction for one value takes 8 times as long. Of a NaN, low
    is NaN, and so are all products with x.
    """
    high = x
    low = x
    if TWO:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # to nearest, ties to even
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = (x - bits.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return high, low


@triton.jit
def add_exact(left, high, low, totals, TWO: tl.constexpr):
    """Two chains go on by left @ high and left @ low; left is exact, in a model's dtype."""
    total, small = totals
    if TWO:
        small = tl.dot(left, low, small)
        total = tl.dot(left, high, total)
    else:
        total = tl.dot(left.to(tl.float32), high, total, input_precision="ieee")
    return total, small


@triton.jit
def sum_of_exact(totals, TWO: tl.constexpr):
    """What the chains of `add_exact` come to."""
    total, small = totals
    total = ended(total)
    if TWO:
        total = ended(small) + total
    return total


@triton.jit
def add_terms(left, right, totals, TWO: tl.constexpr):
    """Three chains go on by fp32 left @ right, of both the terms (high, low)."""
    total, of_left, of_right = totals
    high, low = left
    right_high, right_low = right
    if TWO:
        of_left = tl.dot(low, right_high, of_left)
        of_right = tl.dot(high, right_low, of_right)
        total = tl.dot(high, right_high, total)
    else:
        total = tl.dot(high, right_high, total, input_precision="ieee")
    return total, of_left, of_right


@triton.jit
def sum_of_split(totals, TWO: tl.constexpr):
    """What the chains of `add_terms` come to."""
    total, of_left, of_right = totals
    total = ended(total)
    if TWO:
        total = (ended(of_left) + ended(of_right)) + total
    return total


@triton.jit
def below(weights, x, TWO: tl.constexpr):
    """weights [16, 16] in terms, lower triangular, times x [16, C], by rows.

    A column of x that is not finite in a row is NaN in this row and those below it.
    """
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY
    row = tl.arange(0, 16)
    lower = (row[:, None] >= row[None, :]).to(tl.bfloat16)
    none = tl.zeros(x.shape, tl.float32)
    wrong = tl.dot(lower, tl.where(finite, 0.0, 1.0).to(tl.bfloat16), none)
    known = high_and_low(tl.where(finite, x, 0.0), TWO)
    total = sum_of_split(add_terms(weights, known, (none, none, none), TWO), TWO)
    return tl.where(wrong > 0.0, float("nan"), total)
