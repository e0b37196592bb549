"""Gate and up products of the feed-forward block, then SiLU-and-multiply."""

import torch

from tpdet.kernels.cpu.activation import silu_and_multiply
from tpdet.kernels.cpu.gemm import column_gemm


def gated_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [2 * I, K], gate first -> [M, I] in x's dtype."""
    return silu_and_multiply(column_gemm(x, weight, None, x.dtype))
