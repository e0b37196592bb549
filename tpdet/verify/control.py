"""The negative control: what other engines do, switched in to show that verification can fail.

A stock all-reduce adds in an order that depends on the number of ranks, and a plain matrix product
picks its kernel by the number of rows. `tpdet verify --control` must report differences.
"""

import torch
import torch.distributed as dist

import tpdet.layers.linear
from tpdet.comm.world import World
from tpdet.kernels import ops
from tpdet.kernels.order import FoldPlan


def switch_in_stock_arithmetic() -> None:
    """Replace the fixed-order reduction and products by the stock ones, in this process only."""
    tpdet.layers.linear.fold_over_ranks = _all_reduce
    ops.column_gemm = _plain_column_gemm
    ops.leaf_gemm = _plain_leaf_gemm


def _all_reduce(partials: torch.Tensor, plan: FoldPlan, world: World) -> torch.Tensor:
    total = partials.sum(0)
    if world.size > 1:
        dist.all_reduce(total)
    return total


def _plain_column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    y = torch.mm(x.float(), weight.float().t())
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def _plain_leaf_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    flat = weight.permute(1, 0, 2).reshape(weight.shape[1], -1)
    return torch.mm(x.float(), flat.float().t())[None]
