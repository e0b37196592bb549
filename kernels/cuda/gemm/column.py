"""Matrix products of the GPU path: one fp32 chain over K, in groups of 16, ascending.

    column:  y[m, n] = round(sum over k of x[m, k] * w[n, k] + bias[n])

bf16 and fp16 run on tensor cores, fp32 by `ieee` fma. A column product runs on what the shape table
names once `admission` has tried it (`admitted`), else on the static choice; all are one bit
class, so the choice shows in time only.
"""

from collections.abc import Callable

import torch

from tpdet.kernels.cuda.cost.static import column_tile
from tpdet.kernels.cuda.gemm.choice.library import library_fits, library_product
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted, library_rows
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.operands import descriptor_sms, fitted, run_chain
from tpdet.kernels.cuda.gemm.packed.product import in_scratch, packed_product, way_for
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.cuda.launch.dependent import ALONE, take_turn
from tpdet.kernels.cuda.launch.multiprocessors import all_free
from tpdet.kernels.inputs.activations import activation_number
from tpdet.kernels.inputs.ordered import OrderedWeight

_PAIRED_ROWS = 256  # of a pair of products; of more, the smaller one's time is no longer seen
ByLibrary = Callable[[torch.Tensor, torch.Tensor, int, str], torch.Tensor]


def column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    admitted: Admitted | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] in fp32, rounded once to out_dtype.

    `tile` overrides what was admitted (its depth must divide K). Raises ValueError when K is not a
    multiple of 16 or the operands differ in dtype.
    """
    dtype = out_dtype or x.dtype
    kind = "head" if dtype == torch.float32 else "column"

    def by_library(x: torch.Tensor, weight: torch.Tensor, rows: int, way: str) -> torch.Tensor:
        return library_product(x, weight, dtype, rows, way)

    return product_of_kind(kind, x, weight, bias, dtype, tile, admitted, by_library)


def product_of_kind(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None,
    admitted: Admitted | None,
    by_library: ByLibrary,
) -> torch.Tensor:
    """A product of one leaf by what was given, admitted or chosen statically, in that order.

    As `column_gemm`; of a gated kind, weight and bias are interleaved and the result is [M, N / 2].
    by_library: (x [M, K], weight [N, K], rows, way) -> the result at `rows` >= M rows.
    """
    turn = take_turn() if len(x) else ALONE  # of no rows nothing is launched
    if isinstance(weight, OrderedWeight):
        way = way_for(x, weight)
        if way is not None:
            return packed_product(kind, x, weight, bias, out_dtype, way.tile)
        weight, turn = in_scratch(weight)[0], ALONE
    operands = x, weight.unsqueeze(0)
    x, w = fitted(*operands)
    (m, k), n, gated = x.shape, w.shape[1], activation_number(kind)
    copied = x is not operands[0] or w is not operands[1]
    if copied or m > _PAIRED_ROWS:
        turn = ALONE
    choice = None
    if tile is None and admitted is not None:
        choice = admitted.choice(kind, x, n)
    if choice is not None and choice.library is not None and bias is None and all_free():
        rows = library_rows(m, choice.bucket)
        if rows is not None and library_fits(x, w[0]):
            return by_library(x, w[0], rows, choice.library)
    y = torch.empty(1, m, n // 2 if gated else n, dtype=out_dtype, device=x.device)
    sms = descriptor_sms(x, w, y)
    if choice is not None and (sms or not variant_of(choice.tile).descriptors):
        tile = choice.tile
    if tile is None:
        float32, wide_out = x.dtype == torch.float32, out_dtype == torch.float32
        tile = column_tile(m, n, k, float32=float32, wide_out=wide_out, sms=sms)
    run_chain(Operands(x, w, bias, y, gated, turn=turn), tile, sms)
    return y[0]
