"""Soft-caps of scores and logits: cap * tanh(x / cap) in fp32, by one exponential.

    y = ((E - 1) / (E + 1)) * cap,   E = exp(min(x * fp32(2 / cap), 40))

From 40 on the quotient is exactly 1; NaN stays NaN.
"""

import torch

from tpdet.kernels.inputs.activations import SATURATED, cap_rate


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x [...] fp32 -> [...] fp32 within [-cap, cap]."""
    power = torch.exp((x * cap_rate(cap)).clamp(max=SATURATED))
    return ((power - 1.0) / (power + 1.0)) * cap
