"""Activated gates times ups: y = round((g / (1 + exp(-t))) * u), fp32 (arXiv 2002.05202).

    silu: t = g        gelu_tanh: t = g * (a + (g * g) * b)
    clamped: y = round((u' + 1) * (g' / (1 + exp(-t)))), t = g' * 1.702, g' and u' at most 7

(1 + tanh z) / 2 is 1 / (1 + exp(-2 z)), so the tanh form of GELU is SiLU with another exponent.
"""

import torch

from tpdet.kernels.inputs.activations import (
    ACTIVATIONS,
    CLAMP_LIMIT,
    CLAMP_STEEPNESS,
    CLAMPED,
    GELU_CUBIC,
    GELU_LINEAR,
)
from tpdet.kernels.inputs.gated import gate_and_up


def activate_and_multiply(
    gate_up: torch.Tensor, dtype: torch.dtype | None = None, activation: str = "silu"
) -> torch.Tensor:
    """Interleaved gate_up [M, 2 * I] -> round(act(gate) * up) [M, I] in dtype (gate_up's)."""
    dtype = dtype or gate_up.dtype
    gate, up = (part.float().contiguous() for part in gate_and_up(gate_up))
    if activation == CLAMPED:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        steep = gate * CLAMP_STEEPNESS
        return ((up + 1.0) * (gate / (1.0 + torch.exp(-steep)))).to(dtype)
    return (_activated(gate, activation) * up).to(dtype)


def activate_alone(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [M, I] -> [M, I] in x's dtype, rounded once; without a gate."""
    return _activated(x.float(), activation).to(x.dtype)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    exponent = gate
    if ACTIVATIONS[activation] == ACTIVATIONS["gelu_tanh"]:
        exponent = gate * (GELU_LINEAR + (gate * gate) * GELU_CUBIC)
    return gate / (1.0 + torch.exp(-exponent))
