"""The negative control: stock arithmetic, which shows that verification can fail.

A stock all-reduce adds in an order that depends on the number of ranks, and a stock matrix product
chooses its kernel by the number of rows. Experts are chosen by `torch.topk`, which gives ties no
order, and combined by `index_add_` over all experts of a rank. So `tpdet verify --control` must
report differences.
"""

import torch
import torch.distributed as dist

from tpdet.comm.exchange.fold import GatherExchange
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.order import Expression, FoldPlan
from tpdet.kernels.partial_sums import PartialSums


def switch_in_stock_arithmetic() -> None:
    """Replace the fixed-order reduction and products by stock ones, in this process only."""
    GatherExchange.everyones = _all_reduce  # type: ignore[assignment, method-assign]
    ops.column_gemm = _plain_column_gemm  # type: ignore[assignment]
    ops.leaf_sums = _plain_row_gemm  # type: ignore[assignment]
    ops.choose_experts = choose_by_topk
    ops.expert_sums = combine_by_index_add  # type: ignore[assignment]


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


def choose_by_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    batch: PagedBatch,
    routing: Routing,
    held: range | None = None,
) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Ids [M, k] in the order of `torch.topk`, and weights by a softmax or sigmoid in fp32."""
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(1)
    ids = torch.topk(scores if bias is None else scores + bias, routing.chosen, dim=1).indices
    weights = scores.gather(1, ids)
    if routing.over_chosen:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.int(), weights * routing.scale, None


def combine_by_index_add(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None = None,
    activation: str = "silu",
    sorted_tokens: object = None,
) -> PartialSums:
    """One sum over a rank's experts, by stock products of as many rows as chose each."""
    total = torch.zeros(len(x), down.shape[1], device=x.device)
    for index, expert in enumerate(lanes.experts):
        rows, choice = torch.where(ids == expert)
        if len(rows):
            wide = _plain_column_gemm(x[rows], gate_up[index], _of(biases[0], index), torch.float32)
            mixed = ops.activate_and_multiply(wide, x.dtype, activation)
            y = _plain_column_gemm(mixed, down[index], _of(biases[1], index))
            total.index_add_(0, rows, weights[rows, choice, None] * y.float())
    if isinstance(shared, SharedRows):
        shared = _plain_leaves(shared)
    if shared is not None:
        total = total + shared.sum(0)
    return PartialSums(total[None], (0,))


def _plain_leaves(shared: SharedRows) -> torch.Tensor:
    """All leaves as one stock product [1, M, N]."""
    sums = _plain_row_gemm(shared.mixed, shared.down, ()).values
    return sums if shared.gate is None else ops.gate_lanes(sums, shared.gate.contiguous())


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The stock product, in the model's dtype on a GPU, as other serving engines call it."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t())
    return torch.mm(x.float(), weight.float().t())
