"""The feed-forward block's first product with its activation: gate and up never leave a program.

    y[m, i] = round(act(g[m, i]) * u[m, i])        g, u: chains over K as of `column.py`, fp32

The shape table may name a tile, whose epilogue does it, or the library's product in fp32 with the
activation as a kernel behind it. Both read one layout of the weight and give the same bits.
"""

from functools import partial

import torch

from tpdet.kernels.cuda.gemm.choice.library import library_product
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted
from tpdet.kernels.cuda.gemm.column import product_of_kind
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.pointwise.activation import activate_and_multiply
from tpdet.kernels.inputs.activations import KIND_OF
from tpdet.kernels.inputs.gated import GROUP
from tpdet.kernels.inputs.ordered import OrderedWeight


def gated_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | OrderedWeight,
    tile: Tile | None = None,
    admitted: Admitted | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(act(gate) * up) [M, I] in x's dtype.

    `tile` overrides what was admitted (its depth must divide K). Raises ValueError when K or 2 * I
    is not a multiple of 16 or the operands differ in dtype.
    """
    rows = weight.shape[-2]
    if rows % (2 * GROUP):
        raise ValueError(f"{rows} interleaved rows: they are eights of gates and eights of ups")
    kind, library = KIND_OF[activation], partial(gated_library_product, activation=activation)
    return product_of_kind(kind, x, weight, None, x.dtype, tile, admitted, library)


def gated_library_product(
    x: torch.Tensor, weight: torch.Tensor, rows: int, way: str, activation: str = "silu"
) -> torch.Tensor:
    """The same by a library's fp32 product at `rows` rows and the activation behind it."""
    product = library_product(x, weight, torch.float32, rows, way)
    return activate_and_multiply(product, x.dtype, activation)
