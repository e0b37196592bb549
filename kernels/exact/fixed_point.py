"""Sums in fixed point: int64 additions, so that neither order nor padding can reach a bit.

    sum = Σ int64(rint(x * 2^(bits - e))) * 2^(e - bits)        e = floor(log2(max |x|)) of the sum

`bits` is 40 for up to 2^22 terms and less for more, so that the integers cannot overflow. A term of
0 adds nothing and is no maximum; a sum of one term is that term.
"""

import torch

from tpdet.kernels.order import fraction_bits

_FP64_BIAS = 1023
_FP64_FRACTION = 52


def exponent_of(largest: torch.Tensor) -> torch.Tensor:
    """floor(log2(largest)) as int64, of values >= 0; 0 of zero and of what is not finite."""
    finite = torch.where(torch.isfinite(largest), largest, 1.0)
    return torch.where(largest == 0, 0, torch.frexp(finite).exponent.long() - 1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp64, exactly, for int64 exponents of normal numbers."""
    return ((exponent + _FP64_BIAS) << _FP64_FRACTION).view(torch.float64)


def fixed_point(x: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """rint(x * 2^(bits - exponent)) as int64 for finite x in fp64; |x| < 2^(exponent + 1)."""
    return torch.round(x * power_of_two(bits - exponent)).long()


def order_free_sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The sum of a floating x over `dims`, which stay with size 1, in fp64.

    Infinities and NaN are added as IEEE 754 has it.
    """
    wide = x.double()
    if not wide.numel():
        return wide.sum(dims, keepdim=True)
    largest = wide.abs().amax(dims, keepdim=True)
    exponent, finite = exponent_of(largest), torch.isfinite(largest)
    bits = fraction_bits(wide.numel() // largest.numel())
    whole = fixed_point(torch.where(finite, wide, 0.0), exponent, bits).sum(dims, keepdim=True)
    total = whole.double() * power_of_two(exponent - bits)
    if x.device.type == "cpu" and bool(finite.all()):
        return total
    unbounded = torch.where(torch.isfinite(wide), 0.0, wide).sum(dims, keepdim=True)
    return torch.where(finite, total, unbounded)
