"""SiLU-and-multiply: y = round((g / (1 + exp(-g))) * u), fp32 (Shazeer 2020, arXiv 2002.05202)."""

import torch

from tpdet.kernels.inputs.gated import gate_and_up


def silu_and_multiply(gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Interleaved gate_up [M, 2 * I] -> [M, I] in dtype, rounded once."""
    gate, up = (part.float().contiguous() for part in gate_and_up(gate_up))
    return ((gate / (1.0 + torch.exp(-gate))) * up).to(dtype)
