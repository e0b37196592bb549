"""The feed-forward block's first product with its activation: gate and up are never rounded."""

import torch

from tpdet.kernels.cpu.gemm.column import column_gemm
from tpdet.kernels.cpu.pointwise.activation import silu_and_multiply


def gated_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(silu(gate) * up) [M, I] in x's dtype."""
    return silu_and_multiply(column_gemm(x, weight, None, torch.float32), x.dtype)
