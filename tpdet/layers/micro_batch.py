"""A micro-batch: rows that go through the layers together, all of a step or one part of two.

With two micro-batches, the exchange of one overlaps the products of the other. No bit of a row
depends on which rows it is computed with.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from tpdet.comm.exchange.fold import Done, Exchange, Pending
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

Projected: TypeAlias = tuple[torch.Tensor, ...]
"""What a layer's mixer makes of its rows before it mixes them, each [M, heads, D]: queries, and
gates where heads have some; of linear attention what its output product reads."""


@dataclass
class MicroBatch:
    """The residual stream `hidden_MH` in fp32 and its norm `x_MH`; `overlapped`: its exchanges run
    under the products of another micro-batch.

    `pending` is the exchange that makes the next of both.
    """

    batch: PagedBatch
    hidden_MH: torch.Tensor
    x_MH: torch.Tensor
    overlapped: bool
    pending: Pending | None = None

    def settle(self) -> None:
        """Take what the exchange made; what is launched from now on comes after it."""
        if self.pending is not None:
            self.hidden_MH, self.x_MH = self.pending.result()
            self.pending = None

    def exchanged(
        self, exchange: Exchange, sums: PartialSums, finish: Finish, plan: FoldPlan
    ) -> Pending:
        """An exchange of these rows' sums; overlapped, it runs beside what is launched next."""
        if self.overlapped:
            return exchange.begin(sums, finish, plan)
        return Done(*exchange.fold_and_norm(sums, finish, plan))
