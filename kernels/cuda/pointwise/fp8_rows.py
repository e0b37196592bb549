"""Rows of keys and values in e4m3 with a power of two each, on a GPU: as `exact/fp8_rows.py`.

    codes uint8 [.., D]    exponents uint8 [..]: e + 127; 255 of a row that is not finite

Every product here is one by a power of two and exact, so no fused operation could reach a bit.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.exact import fp8_rows
from tpdet.kernels.order import PAGE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)
BIAS = tl.constexpr(fp8_rows.EXPONENT_BIAS)
MOST = tl.constexpr(fp8_rows.LARGEST_EXPONENT)
NOT_FINITE = tl.constexpr(fp8_rows.NOT_FINITE)
LARGEST = tl.constexpr(fp8_rows.LARGEST)
_LEAST = tl.constexpr(fp8_rows.least_exponent(torch.bfloat16))
_LEAST_OF_HALF = tl.constexpr(fp8_rows.least_exponent(torch.float16))
_INFINITE = tl.constexpr(0x7F800000)
_BELOW_NORMAL = tl.constexpr(2.0**-6)
_GRID = tl.constexpr(2.0**14)
_GRID_BITS = tl.constexpr(0x46800000)


@triton.constexpr_function
def page_size(pages, head):
    """Elements of a page of one key head, by the type of its pointer."""
    return PAGE_TOKENS * (head + (pages == tl.uint8))


@triton.constexpr_function
def least_exponent(dtype):
    """`exact.fp8_rows.least_exponent` of Triton's dtype."""
    return _LEAST_OF_HALF if dtype == tl.float16 else _LEAST


@triton.jit
def largest_bits(x, mask):
    """The bits of |x|, fp32, 0 where masked: their order is that of the values, NaN last."""
    return tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def exponent_of(largest, LEAST: tl.constexpr):
    """The exponents of rows whose largest values have these bits: the least that holds them."""
    exponent = (largest >> 23) - (BIAS + 8) + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, LEAST), MOST)


@triton.jit
def exponent_byte(largest, exponent):
    """What a page holds of a row's exponent."""
    return tl.where(largest < _INFINITE, exponent + BIAS, NOT_FINITE).to(tl.uint8)


@triton.jit
def key_bits(largest, of_value):
    """The bits of keys' largest values, infinite where the token's own value is not finite."""
    return tl.where(of_value < _INFINITE, largest, _INFINITE)


@triton.jit
def value_exponent_byte(largest, exponent, LEAST: tl.constexpr):
    """`exponent_byte` of values, which are zeros where they are not finite: their keys say so."""
    return tl.where(largest < _INFINITE, exponent + BIAS, LEAST + BIAS).to(tl.uint8)


@triton.jit
def codes_of(x, largest, exponent):
    """Codes of x, fp32, by the largest bits and exponents of their rows, of x's shape."""
    power = ((-exponent + BIAS) << 23).to(tl.float32, bitcast=True)
    scaled = x * power
    size = tl.minimum(tl.abs(scaled), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    small = (size + _GRID).to(tl.int32, bitcast=True) - _GRID_BITS
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    codes = tl.where(size < _BELOW_NORMAL, small, normal) | sign
    return tl.where(largest < _INFINITE, codes, 0).to(tl.uint8)


@triton.jit
def numbers_of(codes, exponents, dtype: tl.constexpr):
    """The numbers of codes, by their rows' exponents (of a shape that broadcasts), in `dtype`."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    stored = exponents.to(tl.int32)
    power = ((stored + 120) << 23).to(tl.float32, bitcast=True)
    power = tl.where(stored == NOT_FINITE, float("nan"), power)
    return (bits.to(tl.float32, bitcast=True) * power).to(dtype)


@triton.jit
def load_exponents(page, offset, stored, HEAD: tl.constexpr):
    """Exponents of rows [R] of a key head's page, 0 of those that are not stored."""
    return tl.load(page + PAGE * HEAD + offset, mask=stored, other=0)
