"""Sigmoid gates in fp32, s(g) = 1 / (1 + exp(-g)): of attention's heads, of shared experts."""

import torch


def gate_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [M, H, D] -> round(x * s(gate)) [M, H, D] in x's dtype (arXiv 2505.06708)."""
    return (x.float() * _sigmoid(gate)).to(x.dtype)


def gate_lanes(sums: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Sums [lanes, M, N], a row's gate [M, 1], both fp32 -> sums * s(gate) in fp32."""
    return sums * _sigmoid(gate)


def _sigmoid(gate: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-gate.float().contiguous()))
