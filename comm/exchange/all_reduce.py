"""The exchange of the approximate mode: a library's all-reduce in the model's dtype.

What only moves bytes (rows of the embedding, small gathers, the look for lost peers) stays with the
exchange of the deterministic engine, so that the two modes differ in arithmetic alone.
"""

from contextlib import AbstractContextManager

import torch

from tpdet.comm.exchange.fold import Done, Pending, RankExchange
from tpdet.comm.exchange.peer_memory import PeerMemory
from tpdet.comm.exchange.rows import RowExchange
from tpdet.comm.world.world import World
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.partial_sums import PartialSums


class AllReduceExchange:
    """Sums of all ranks by `World.add_in_any_order`; then residual and norm in one kernel."""

    def __init__(self, world: World, carrier: RankExchange) -> None:
        """carrier: the exchange that goes on moving bytes."""
        self.memory: PeerMemory | None = carrier.memory
        self._world = world
        self._carrier = carrier

    def fold_and_norm(
        self, sums: PartialSums, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's one product [1, M, H] in the model's dtype -> (h, y), whole on every rank."""
        total = self._world.add_in_any_order(sums.values)
        return ops.fold_and_norm(PartialSums(total, (0,)), None, residual, norm)

    @property
    def overlap_programs(self) -> int:
        """None: as in stock engines, the all-reduce stands in line with the products."""
        return 0

    def begin(self, sums: PartialSums, residual: torch.Tensor, norm: Norm) -> Pending:
        """`fold_and_norm`, at once."""
        return Done(*self.fold_and_norm(sums, residual, norm))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The carrier's."""
        return self._carrier.all_gather(x)

    def rehearsal(self) -> AbstractContextManager[None]:
        """The carrier's."""
        return self._carrier.rehearsal()

    def open_rows(self, columns: int, rows: int) -> RowExchange:
        """The carrier's."""
        return self._carrier.open_rows(columns, rows)

    def report(self) -> None:
        """The carrier's."""
        self._carrier.report()

    def check(self) -> None:
        """The carrier's. Raises PeerLostError."""
        self._carrier.check()

    def set_timeout(self, seconds: float) -> None:
        """The carrier's."""
        self._carrier.set_timeout(seconds)
