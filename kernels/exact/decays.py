"""Gates of the gated delta rule in fixed point and fp64, the same bits on every device.

    l = int64(rint(max(-exp(a_log) * softplus(a + dt_bias), -128) * 2^40))
    decay of a sum of l = fp32(exp(sum * 2^-40)),   sigmoid(b) = fp32(1 / (1 + exp(-b)))

A decay between two rows is made of the difference of two prefix sums of l, which are integers: no
order can change it, and it does not underflow as a quotient of two products would. exp and softplus
are fp64 additions, multiplications and divisions alone (Cody and Waite's reduction with fdlibm's
parts of log 2, a Taylor sum, and the series of atanh), so no math library can change a gate.
"""

import math

import torch

from tpdet.kernels.exact.fixed_point import power_of_two
from tpdet.kernels.inputs.linear_state import DeltaGates

DECAY_BITS = 40
STRONGEST = -128.0
"""The smallest log decay of one row; exp of it is +0 in all but fp64."""
LOWEST = -700.0
"""exp is that of LOWEST below it: +0 in fp32."""
TURNS = 1.0 / math.log(2.0)
LOG2_PARTS = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
ATANH_TERMS = tuple(1.0 / (2 * n + 1) for n in range(16, -1, -1))


def exponential(x: torch.Tensor) -> torch.Tensor:
    """exp of fp64 x <= 700, within 2 ulp; NaN stays NaN."""
    x = torch.where(x < LOWEST, LOWEST, x)
    turns = torch.floor(x * TURNS + 0.5)
    rest = (x - turns * LOG2_PARTS[0]) - turns * LOG2_PARTS[1]
    whole = torch.where(turns.isnan(), 0.0, turns).long()
    return _horner(EXP_TERMS, rest) * power_of_two(whole)


def log_decays(a: torch.Tensor, gates: DeltaGates) -> torch.Tensor:
    """a [M, Hv] -> l [M, Hv] int64; -128 where a is NaN, whose row is NaN elsewhere."""
    x = a.double() + gates.dt_bias.double()
    small = exponential(-x.abs())
    ratio = small / (small + 2.0)
    tail = (ratio + ratio) * _horner(ATANH_TERMS, ratio * ratio)
    softplus = torch.where(x > 0, x, 0.0) + tail
    decay = -(exponential(gates.a_log.double()) * softplus)
    decay = torch.where(decay > STRONGEST, decay, STRONGEST)
    return torch.round(decay * 2.0**DECAY_BITS).long()


def decay_of(total: torch.Tensor) -> torch.Tensor:
    """Sums of l, int64 <= 0 -> factors in fp32."""
    return exponential(total.double() * 2.0**-DECAY_BITS).float()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in fp32, from fp64."""
    wide = x.double()
    small = exponential(-wide.abs())
    return (torch.where(wide < 0, small, 1.0) / (small + 1.0)).float()


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
