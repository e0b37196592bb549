"""Gate and up products of the feed-forward block, then SiLU-and-multiply: in one kernel or in two.

    y[m, i] = round(silu(round(x[m] . w[i])) * round(x[m] . w[I + i]))

With many rows `gated_chain` does both, else a column product and `activation` do: one bit class, so
the choice shows in time only.
"""

import torch

from tpdet.kernels.cuda.activation import silu_and_multiply
from tpdet.kernels.cuda.gated_chain import run_gated
from tpdet.kernels.cuda.gemm import column_gemm
from tpdet.kernels.cuda.gemm_operands import descriptor_sms, fitted
from tpdet.kernels.cuda.gemm_variants import Variant

GATED_ELEMENTS: int | None = 1024 * 6144
"""From so many values of y on both are one kernel: its tiles are too large for less. None: never"""
GATED_TILE = Variant(128, 256, 64, 8, 4, descriptor=True)
"""Its output takes half of a column product's shared memory: room for a stage more."""


def gated_gemm(
    x: torch.Tensor, weight: torch.Tensor, fused: bool | None = None, tile: Variant = GATED_TILE
) -> torch.Tensor:
    """x [M, K], weight [2 * I, K], gate first -> [M, I] in x's dtype.

    fused: one kernel or two, whatever the size. Raises ValueError where one is asked for and does
    not fit, and as `column_gemm`.
    """
    x, w = fitted(x, weight.unsqueeze(0))
    y = torch.empty(x.shape[0], w.shape[1] // 2, dtype=x.dtype, device=x.device)
    sms = 0 if fused is False or not (fused or worth_fusing(y)) else _sms(x, w[0], y, tile)
    if sms:
        run_gated(x, w[0], y, tile, sms)
        return y
    if fused:
        raise ValueError(f"{tuple(x.shape)} {x.dtype} by {tile} do not fit: use fused=False")
    return silu_and_multiply(column_gemm(x, weight, None, x.dtype))


def worth_fusing(y: torch.Tensor) -> bool:
    """Whether y [M, I] is large enough."""
    return GATED_ELEMENTS is not None and y.numel() >= GATED_ELEMENTS


def _sms(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile: Variant) -> int:
    """Multiprocessors for the kernel; 0 if it does not fit."""
    if x.element_size() != 2 or w.shape[0] % 2 or w.shape[1] % tile.depth or not y.numel():
        return 0
    return descriptor_sms(x, w, y)
