"""The feed-forward block's first product with its activation: gate and up are never rounded."""

import torch

from tpdet.kernels.cpu.gemm.column import column_gemm
from tpdet.kernels.cpu.pointwise.activation import activate_and_multiply
from tpdet.kernels.inputs.packed import Weight


def gated_gemm(
    x: torch.Tensor, weight: Weight, *, admitted: object = None, activation: str = "silu"
) -> torch.Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(act(gate) * up) [M, I] in x's dtype.

    activation: of `kernels/inputs/activations.py`. The weight is that of `interleaved`
    (`kernels/inputs/gated.py`). admitted: as of `column_gemm`.
    """
    return activate_and_multiply(column_gemm(x, weight, None, torch.float32), x.dtype, activation)
