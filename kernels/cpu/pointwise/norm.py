"""Root-mean-square norm with an order-free sum (Zhang and Sennrich 2019, arXiv 1910.07467).

    y = round((x * r) * w),   r = fp32(1 / sqrt(sum / n + eps))

The sum of squares is int64 fixed point: round(x^2 * 2^(40 - 2e)), e the exponent of the row's
largest |x|, so no layout can change it. x^2 is exact in fp64; n <= 2^20 keeps the sum below 2^62.
A row with NaN or infinity gives NaN. r is computed in fp64 and rounded once.

A layer norm takes d = x - mean for x, and adds a bias before the rounding. The mean is fp32 of
sum * 2^(e - 40) / n, and the sum of int64: round(x * 2^(40 - e)).
"""

from typing import NamedTuple

import torch

from tpdet.kernels.exact.fixed_point import exponent_of, power_of_two
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import MASS_BITS


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [..., N] in any float dtype, norm [N] -> [..., N] in the norm's dtype, rounded once.

    By the norm's kind: a layer norm is the norm of x without its mean, plus a bias.
    """
    wide = x.float()
    if norm.formula == "rms":
        return normalize(wide, norm.weight, norm.eps).to(norm.dtype)
    factor, bias = norm.weight
    centred = wide - row_mean(wide)
    return (normalize(centred, factor, norm.eps) + bias.float()).to(norm.dtype)


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean [..., 1] in fp32 of rows x [..., N] in fp32, by an int64 sum; 0 if not finite."""
    largest = x.abs().amax(-1, keepdim=True)
    exponent = exponent_of(largest)
    wide = torch.where(torch.isfinite(largest), x, 0.0).double()
    total = torch.round(wide * power_of_two(MASS_BITS - exponent)).long().sum(-1, keepdim=True)
    return (total.double() * power_of_two(exponent - MASS_BITS) / x.shape[-1]).float()


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(x * r) * w in fp32 for x [..., N] in fp32: the norm without its final rounding."""
    return (x * _reciprocal_root(x, eps)) * weight.float()


def row_largest(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> the largest |x| of each row [M] fp32; NaN where there is one; 0 of no values."""
    if x.shape[1] == 0:
        return torch.zeros(len(x))
    return x.float().abs().amax(-1)


def row_mass(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> the integer sum of its squares [M] int64, by the exponent of `largest` [M]."""
    return _mass(x.float(), _Scale.of(largest[:, None]))[:, 0]


def norm_by_mass(
    x: torch.Tensor, largest: torch.Tensor, mass: torch.Tensor, count: int, norm: Norm
) -> torch.Tensor:
    """x [M, N], part of rows of `count` values with that largest |x| and mass -> their norm."""
    root = _root_of(mass[:, None], _Scale.of(largest[:, None]), count, norm.eps)
    return ((x.float() * root) * norm.weight.float()).to(norm.dtype)


def _reciprocal_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """r [..., 1] in fp32."""
    scale = _Scale.of(x.abs().amax(-1, keepdim=True))
    return _root_of(_mass(x, scale), scale, x.shape[-1], eps)


class _Scale(NamedTuple):
    """A square's unit is 2^exponent [..., 1] int64; the rows that are finite, None if all are."""

    exponent: torch.Tensor
    finite: torch.Tensor | None

    @classmethod
    def of(cls, largest: torch.Tensor) -> "_Scale":
        """By the largest |x| of each row [..., 1]."""
        finite = torch.isfinite(largest)
        return cls(2 * exponent_of(largest) - MASS_BITS, None if bool(finite.all()) else finite)


def _mass(x: torch.Tensor, scale: _Scale) -> torch.Tensor:
    """The sum of squares [..., 1] in int64 fixed point; 0 of a row that is not finite."""
    wide = (x if scale.finite is None else torch.where(scale.finite, x, 0.0)).double()
    return torch.round(wide * wide * power_of_two(-scale.exponent)).long().sum(-1, keepdim=True)


def _root_of(total: torch.Tensor, scale: _Scale, count: int, eps: float) -> torch.Tensor:
    """r [..., 1] in fp32 of rows of `count` values."""
    mean = total.double() * power_of_two(scale.exponent) / count
    root = (1.0 / torch.sqrt(mean + eps)).float()
    return root if scale.finite is None else torch.where(scale.finite, root, torch.nan)


def reciprocal_length(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(sum of squares + eps), fp32 [...] of x [..., N] in fp32; as a norm's r without n."""
    scale = _Scale.of(x.abs().amax(-1, keepdim=True))
    return _root_of(_mass(x, scale), scale, 1, eps)[..., 0]
