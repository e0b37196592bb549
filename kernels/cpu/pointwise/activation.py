"""SiLU-and-multiply: y = round((g / (1 + exp(-g))) * u), fp32 (Shazeer 2020, arXiv 2002.05202)."""

import torch


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2 * I], gate first -> [M, I] in the same dtype, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.contiguous()
    return ((gate / (1.0 + torch.exp(-gate))) * up).to(gate_up.dtype)
