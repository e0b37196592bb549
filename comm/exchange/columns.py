"""Row layers whose ranks add nothing: columns of all ranks, side by side, become whole rows.

A row layer that is cut over its outputs needs two exchanges. Both copy bits, in the dtype of the
activations:

    x  = exchange.gather_columns(mixed)                            # whole inputs, on every rank
    y  = product of x and this rank's outputs
    h, normed = exchange.gather_and_norm(y, finish)                # whole outputs, added, normed

`GatherExchange` does it on any transport, `PeerColumns` over peer memory.
"""

from typing import Protocol, runtime_checkable

import torch

from tpdet.comm.exchange.fold import RankExchange
from tpdet.kernels.inputs.norm import Finish


@runtime_checkable
class ColumnExchange(RankExchange, Protocol):
    """How columns that ranks hold become whole rows, the residual stream and its norm."""

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...] = ()) -> torch.Tensor:
        """This rank's columns x [M, W] -> [M, ranks * W] in rank order; may be `x` itself.

        widths: of all ranks; () where every rank has as many. Raises UsageError where they may not
        differ.
        """

    def gather_and_norm(
        self, x: torch.Tensor, finish: Finish, widths: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns x [M, W] and the end of rows -> (h, y) [M, H], complete on every rank."""
