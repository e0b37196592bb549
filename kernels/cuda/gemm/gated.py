"""The feed-forward block's first product with its activation: gate and up never leave a program.

    y[m, i] = round(silu(g[m, i]) * u[m, i])        g, u: chains over K as of `column.py`, fp32

The shape table may name a tile, whose epilogue does it, or the library's product in fp32 with the
activation as a kernel behind it. Both read one layout of the weight and give the same bits.
"""

import torch

from tpdet.kernels.cuda.gemm.choice.library import library_fits, library_product
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted, library_rows
from tpdet.kernels.cuda.gemm.choice.static import gated_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.operands import descriptor_sms, fitted, run_chain
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.multiprocessors import all_free
from tpdet.kernels.cuda.pointwise.activation import silu_and_multiply


def gated_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile | None = None,
    admitted: Admitted | None = None,
) -> torch.Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(silu(gate) * up) [M, I] in x's dtype.

    `tile` overrides what was admitted (its depth must divide K). Raises ValueError when K or 2 * I
    is not a multiple of 16 or the operands differ in dtype.
    """
    x, w = fitted(x, weight.unsqueeze(0))
    (m, k), n = x.shape, w.shape[1]
    if n % 16:
        raise ValueError(f"{n} interleaved rows: they are eights of gates and eights of ups")
    choice = None
    if tile is None and admitted is not None:
        choice = admitted.choice("gated", x, n)
    if choice is not None and choice.library is not None and all_free():
        rows = library_rows(m, choice.bucket)
        if rows is not None and library_fits(x, w[0]):
            return gated_library_product(x, w[0], rows, choice.library)
    y = torch.empty(1, m, n // 2, dtype=x.dtype, device=x.device)
    sms = descriptor_sms(x, w, y)
    if choice is not None and (sms or not variant_of(choice.tile).descriptors):
        tile = choice.tile
    if tile is None:
        tile = gated_tile(m, n, k, float32=x.dtype == torch.float32, sms=sms)
    run_chain(x, w, None, y, tile, sms, gated=True)
    return y[0]


def gated_library_product(
    x: torch.Tensor, weight: torch.Tensor, rows: int, way: str
) -> torch.Tensor:
    """The same by a library's fp32 product at `rows` rows and the activation behind it."""
    return silu_and_multiply(library_product(x, weight, torch.float32, rows, way), x.dtype)
