"""The negative control: what other engines do, switched in to show that verification can fail.

A stock all-reduce adds in an order that depends on the number of ranks, and a plain matrix product
picks its kernel by the number of rows. `tpdet verify --control` must report differences.
"""

import torch
import torch.distributed as dist

import tpdet.layers.linear
from tpdet.comm.world import World
from tpdet.kernels import ops
from tpdet.kernels.order import Expression, FoldPlan


def switch_in_stock_arithmetic() -> None:
    """Replace the fixed-order reduction and products by the stock ones, in this process only."""
    tpdet.layers.linear.add_roots = _all_reduce
    ops.column_gemm = _plain_column_gemm
    ops.leaf_fold_gemm = _plain_row_gemm


def _all_reduce(
    sent: torch.Tensor, plan: FoldPlan, world: World, two_shot_rows: int = 0
) -> torch.Tensor:
    """`sent[0]` [M, N] is this rank's one partial sum."""
    total = sent[0]
    if world.size > 1:
        dist.all_reduce(total)
    return total


def _plain_column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    y = _product(x, weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def _plain_row_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    first_leaf: int,
    roots: tuple[Expression, ...],
    slots: int,
) -> torch.Tensor:
    flat = weight.permute(1, 0, 2).reshape(weight.shape[1], -1)
    sent = torch.zeros(slots, x.shape[0], weight.shape[1], device=x.device)
    sent[0] = _product(x, flat)
    return sent


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The stock product: of the model's dtype on a GPU, as serving engines call it."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t())
    return torch.mm(x.float(), weight.float().t())
