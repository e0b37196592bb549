"""Experts that are cut over their outputs on all ranks: what travels, and the stream it ends in.

    whole = columns.gather(mixed)                       # rows between an expert's two products
    h, y = columns.add(total, finish)                   # fp32 totals of each row, added, normed

Both copy bits. A rank's totals are already the fold of all lanes, of its columns: ranks add
nothing. Of a token and layer a rank receives `k * I * size + 4 * H` bytes, less its own share.
"""

from typing import Protocol

import torch

from tpdet.comm.exchange.columns import ColumnExchange
from tpdet.comm.exchange.fold import GatherExchange, RankExchange
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.partial_sums import PartialSums, whole_sum


class ExpertColumns(Protocol):
    """How rows and totals of experts that are cut over their outputs become whole."""

    def gather(self, mixed: torch.Tensor) -> torch.Tensor:
        """This rank's columns [M, k, I / ranks] of every choice's row -> [M, k, I]."""

    def add(self, total: torch.Tensor, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's columns of totals [M, H / ranks] fp32, a finish -> (h, y) [M, H].

        Of h a rank gets the rows that it owns, as of the exchange of sums.
        """


class GatheredExperts:
    """By an exchange of columns after which every rank has the whole stream: any transport."""

    def __init__(self, exchange: ColumnExchange) -> None:
        self._exchange = exchange

    def gather(self, mixed: torch.Tensor) -> torch.Tensor:
        """Row by row of every choice."""
        return _gathered(self._exchange, mixed)

    def add(self, total: torch.Tensor, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank adds and norms every row."""
        return self._exchange.gather_and_norm(total, finish)


class PeerExperts:
    """Over peer memory, beside an exchange of sums whose ranks own the rows of large steps.

    In such a step totals travel by that exchange, with +0 in the columns of other ranks. The sums
    are exact then, because no total is -0: a lane begins with +0.
    """

    def __init__(
        self, fold: PeerExchange, rows: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """rows: the most of a step; shape: choices of a row, the experts' width, the stream's.

        Collective: every rank makes its own together.
        """
        chosen, width, hidden = shape
        self._fold, self._world = fold, fold.carrier.world
        of = fold.carrier.memory, rows * chosen, (width, width), dtype
        self._rows = PeerColumns(*of, carrier=fold.carrier)
        few = min(rows, fold.layout.one_shot_rows)
        of = fold.carrier.memory, few, (hidden, hidden), torch.float32
        self._totals = PeerColumns(*of, carrier=fold.carrier)

    def gather(self, mixed: torch.Tensor) -> torch.Tensor:
        """Row by row of every choice."""
        return _gathered(self._rows, mixed)

    def add(self, total: torch.Tensor, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
        """A gather of totals where every rank has the whole stream, else the fold."""
        residual = finish.residual
        if self._fold.takes_one_shot(len(residual)):
            return ops.fold_and_norm(whole_sum(self._totals.gather_columns(total)), finish)
        width, slots = total.shape[1], len(self._fold.plan.roots[self._world.rank])
        sent = total.new_zeros(slots, *residual.shape)
        sent[0, :, self._world.rank * width :][:, :width] = total
        return self._fold.fold_and_norm(PartialSums(sent, tuple(range(slots))), finish)


def open_experts(
    exchange: RankExchange, rows: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> ExpertColumns:
    """What goes with an exchange of sums; arguments as of `PeerExperts`. Collective.

    Raises TypeError for an exchange that has no columns.
    """
    if isinstance(exchange, PeerExchange):
        return PeerExperts(exchange, rows, shape, dtype)
    if not isinstance(exchange, GatherExchange):
        raise TypeError(f"{type(exchange).__name__} gathers no columns: open one that does")
    return GatheredExperts(exchange)


def _gathered(exchange: ColumnExchange, mixed: torch.Tensor) -> torch.Tensor:
    rows, chosen, width = mixed.shape
    whole = exchange.gather_columns(mixed.view(rows * chosen, width))
    return whole.view(rows, chosen, -1)
