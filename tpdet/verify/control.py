"""The negative control: stock arithmetic, which shows that verification can fail.

A stock all-reduce adds in an order that depends on the number of ranks, and a stock matrix product
chooses its kernel by the number of rows. So `tpdet verify --control` must report differences.
"""

import torch
import torch.distributed as dist

from tpdet.comm.exchange.fold import GatherExchange
from tpdet.kernels import ops
from tpdet.kernels.order import Expression, FoldPlan
from tpdet.kernels.partial_sums import PartialSums


def switch_in_stock_arithmetic() -> None:
    """Replace the fixed-order reduction and products by stock ones, in this process only."""
    GatherExchange.everyones = _all_reduce  # type: ignore[assignment, method-assign]
    ops.column_gemm = _plain_column_gemm
    ops.leaf_sums = _plain_row_gemm


def _all_reduce(
    exchange: GatherExchange, sums: PartialSums, plan: FoldPlan | None = None
) -> PartialSums:
    """`sums` is this rank's one partial sum."""
    if exchange._world.size > 1:
        dist.all_reduce(sums.values)
    return sums


def _plain_column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    admitted: object = None,
) -> torch.Tensor:
    y = _product(x, weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def _plain_row_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    roots: tuple[Expression, ...],
    admitted: object = None,
    widths: tuple[int, ...] = (),
) -> PartialSums:
    flat = weight.permute(1, 0, 2).reshape(weight.shape[1], -1)
    return PartialSums(_product(x, flat).float()[None], (0,))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The stock product, in the model's dtype on a GPU, as other serving engines call it."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t())
    return torch.mm(x.float(), weight.float().t())
