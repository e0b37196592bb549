"""Rows of keys and values in e4m3 with one power of two each: what an fp8 page holds, and reads as.

A row is a token's key, or its value, of one key head: D values of the model's dtype, rounded to it.
`docs/numerics.md` section 5b has the rule in words; the GPU's kernels have the same operations.

A page holds, of each key head, 256 rows of D codes and behind them 256 bytes of exponents:
uint8 [P, Hkv, 256 * (D + 1)]. An exponent e stands as e + 127; 255 is a row that is not finite.
"""

from typing import TypeAlias

import torch

from tpdet.kernels.order import PAGE_TOKENS

EXPONENT_BIAS = 127
LARGEST_EXPONENT = 7
NOT_FINITE = 255
LARGEST = 448.0  # of e4m3
_SMALLEST_NORMAL = 2.0**-6
_REBIAS = 120 << 23  # from fp32's exponents to e4m3's
_DROPPED = 20  # bits of fp32's significand behind those of e4m3
_GRID = 2.0**14  # what is added to it is rounded to multiples of 2^-9
_CODES_OF_GRID = 0x46800000  # the bits of _GRID


def least_exponent(dtype: torch.dtype) -> int:
    """The exponent by which e4m3's least number is the least of a dtype; of fp32, that of bf16."""
    return -15 if dtype == torch.float16 else -124


def fp8_page_bytes(head: int) -> int:
    """Bytes of a page of one key head's keys, or values."""
    return PAGE_TOKENS * (head + 1)


def encode_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., D] -> codes [.., D] and exponents [..] as pages hold them, uint8."""
    wide = x.float()
    magnitude = wide.abs().view(torch.int32)
    largest = magnitude.amax(-1)
    # 1. the least e by which the largest is 448 * 2^e at most; 1.75 has the bits 0x600000
    exponent = (largest >> 23) - (EXPONENT_BIAS + 8) + ((largest & 0x7FFFFF) > 0x600000).int()
    exponent = exponent.clamp(least_exponent(x.dtype), LARGEST_EXPONENT)
    # 2. x * 2^-e to the nearest code
    scaled = (wide * _power(-exponent)[..., None]).clamp(-LARGEST, LARGEST)
    size = scaled.abs()
    bits = size.view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    normal = (bits - _REBIAS + ((1 << (_DROPPED - 1)) - 1) + odd) >> _DROPPED
    small = (size + _GRID).view(torch.int32) - _CODES_OF_GRID
    sign = (wide.view(torch.int32) >> 24) & 0x80
    codes = torch.where(size < _SMALLEST_NORMAL, small, normal) | sign
    # 3. a row that is not finite
    finite = largest < 0x7F800000
    codes = torch.where(finite[..., None], codes, 0).to(torch.uint8)
    return codes, torch.where(finite, exponent + EXPONENT_BIAS, NOT_FINITE).to(torch.uint8)


Stored: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Codes [.., D] and exponents [..] of rows."""


def encode_pairs(k: torch.Tensor, v: torch.Tensor) -> tuple[Stored, Stored]:
    """Keys and values [.., D] of the same tokens and heads as pages hold them.

    A key whose own value is not finite is not finite either, and that value is zeros: as a value's
    weight is 0 of the queries before it, and 0 times NaN is NaN.
    """
    (k_codes, k_exponents), (v_codes, v_exponents) = encode_rows(k), encode_rows(v)
    lost = v_exponents == NOT_FINITE
    k_codes = k_codes.masked_fill(lost[..., None], 0)
    k_exponents = k_exponents.masked_fill(lost, NOT_FINITE)
    zeros = least_exponent(v.dtype) + EXPONENT_BIAS
    return (k_codes, k_exponents), (v_codes, v_exponents.masked_fill(lost, zeros))


def decode_rows(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [.., D] that codes [.., D] and exponents [..] stand for: exact in `dtype`."""
    wide = codes.int()
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << _DROPPED)  # q * 2^-120
    stored = exponents.int()
    power = ((stored + 120) << 23).view(torch.float32)
    power = torch.where(stored == NOT_FINITE, torch.nan, power)
    return (bits.view(torch.float32) * power[..., None]).to(dtype)


def rows_of(pages: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [P, Hkv, 256, D] and exponents [P, Hkv, 256] of pages, as views."""
    codes, exponents = pages.split([PAGE_TOKENS * head, PAGE_TOKENS], -1)
    return codes.unflatten(-1, (PAGE_TOKENS, head)), exponents


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, of exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)
