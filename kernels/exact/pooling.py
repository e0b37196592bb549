"""The arithmetic of pooled answers (docs/numerics.md, section 7a): sums have no order.

A mean is an int64 sum at the fixed scale 2^MEAN_BITS, a length an `order_free_sum` of squares;
exponentials are the C library's in fp64, of one value at a time, added by `math.fsum`.
"""

import math

import torch

from tpdet.kernels.exact.fixed_point import order_free_sum

MEAN_BITS = 28
"""Bits behind the point of a mean's terms."""
MEAN_LIMIT, MEAN_ROWS = 2.0**15, 1 << 20
"""A term's size is below this, and there are at most so many: the int64 sum cannot overflow."""
LEAST_LENGTH = 1e-12


def mean_terms(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, W] fp32 -> their part of a mean: Σ int64(rint(x * 2^28)) [W], and max |x|."""
    largest = rows.abs().amax()
    bounded = torch.where(rows.abs() < MEAN_LIMIT, rows, 0.0).double()
    return torch.round(bounded * 2.0**MEAN_BITS).long().sum(0), largest


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """fp32(fp64(total) * 2^-28 / count): int64 [W] -> fp32 [W]."""
    return (total.double() * 2.0**-MEAN_BITS / count).float()


def normalised(x: torch.Tensor) -> torch.Tensor:
    """fp32(x / max(sqrt(Σ x²), 1e-12)) of a finite fp32 x [W]; squares, root and quotient in fp64.

    Σ is `order_free_sum`, so neither order nor layout reaches it.
    """
    wide = x.double()
    length = order_free_sum(wide * wide, [0]).sqrt().clamp(min=LEAST_LENGTH)
    return (wide / length).float()


def similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32(Σ a b) of two fp32 vectors [W], by `order_free_sum` of exact fp64 products -> [1]."""
    return order_free_sum(a.double() * b.double(), [0]).float()


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """A finite fp32 x [W] -> fp32 [W]; each element is rounded once from fp64.

    identity; tanh; sigmoid, 1 / (1 + exp(-x)); softmax, exp(x - max) / fsum of all.
    """
    if activation == "identity":
        return x
    values = x.tolist()
    if activation == "softmax":
        weights = [math.exp(value - max(values)) for value in values]
        total = math.fsum(weights)
        numbers = [weight / total for weight in weights]
    else:
        numbers = [{"tanh": math.tanh, "sigmoid": _sigmoid}[activation](value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64).float()


def _sigmoid(x: float) -> float:
    """No exponential of a positive number: it would overflow."""
    weight = math.exp(-abs(x))
    return 1.0 / (1.0 + weight) if x >= 0.0 else weight / (1.0 + weight)
