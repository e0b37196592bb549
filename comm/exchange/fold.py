"""The fixed-order reduction: every rank sends its subtree roots, and the rest is added in order.

Pattern of use: a row-parallel layer makes the sums of its leaves (`ops.leaf_sums`) and hands them,
with the residual stream and the norms around it, to an exchange; all ranks get the bits that a
single rank would. The transport copies bytes; the additions are ours.

    one-shot   roots to everyone, everyone adds all rows            few rows: one collective
    two-shot   roots of rows [r * share, ...) to rank r, which adds them, then the sums to everyone
               share = ceil(M / ranks); a rank may own no row       many rows: fewer bytes

Both evaluate one expression once an element (Rule 4), so the bits are equal and the number of rows
may choose.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tpdet.comm.exchange.carrier import Carrier, WorldCarrier
from tpdet.comm.world.world import World
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan, Slot
from tpdet.kernels.partial_sums import PartialSums, gathered_sums, whole_sum

TWO_SHOT_ROWS = 256
"""The two-shot is taken from this number of rows on."""


class Pending(Protocol):
    """An exchange that was begun."""

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, y): what follows on the current stream comes after the exchange."""


@dataclass(frozen=True)
class Done:
    """An exchange that was launched where its results are read."""

    h: torch.Tensor
    y: torch.Tensor

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, y)."""
        return self.h, self.y


class RankExchange(Protocol):
    """What every way of exchanging row layers' results has: a carrier, and a stream of rows."""

    @property
    def carrier(self) -> Carrier:
        """What moves small payloads and watches for lost peers."""

    @property
    def overlap_programs(self) -> int:
        """Multiprocessors that a begun exchange takes from other work; 0: it overlaps nothing."""

    def stream_rows(
        self, hidden_MH: torch.Tensor, numbers_R: torch.Tensor, parts: tuple[int, ...]
    ) -> torch.Tensor:
        """Rows of the residual stream by their numbers int64 [R] -> fp32 [R, H] on every rank.

        hidden_MH: as exchanges left it to this rank; parts: the rows of each micro-batch that was
        exchanged, in order. Collective: the numbers are every rank's.
        """


@runtime_checkable
class Exchange(RankExchange, Protocol):
    """How row-parallel sums of all ranks become one residual stream and its norm."""

    def fold_and_norm(
        self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's sums [C, M, H] and what becomes of all ranks' -> (h, y), both [M, H].

        plan: of a product without some leaves; None: the exchange's own. y is complete on every
        rank. Of h, as of the finish's residual, a rank needs and gets only the rows that it adds
        itself; what it was given for the others is not read.
        """

    def begin(self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None) -> Pending:
        """`fold_and_norm` beside what is launched next, until `result`; where that is possible."""


class WholeStream:
    """An exchange in line with the products, after which every rank has the whole stream."""

    overlap_programs = 0

    def stream_rows(
        self, hidden_MH: torch.Tensor, numbers_R: torch.Tensor, parts: tuple[int, ...]
    ) -> torch.Tensor:
        """A copy of these rows."""
        return hidden_MH.index_select(0, numbers_R)


class InLine(WholeStream):
    """An exchange of sums that overlaps nothing."""

    def begin(
        self: Exchange, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None
    ) -> Pending:
        """`fold_and_norm`, at once."""
        return Done(*self.fold_and_norm(sums, finish, plan))


class GatherExchange(InLine):
    """All-gather and all-to-all of the world: any transport, any device."""

    def __init__(self, plan: FoldPlan, world: World, two_shot_rows: int = TWO_SHOT_ROWS) -> None:
        self.carrier: Carrier = WorldCarrier(world)
        self._plan = plan
        self._world = world
        self._two_shot_rows = two_shot_rows

    def fold_and_norm(
        self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank adds and norms every row of h, once it has the sums."""
        return ops.fold_and_norm(self.everyones(sums, plan), finish)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...] = ()) -> torch.Tensor:
        """Every rank's columns side by side; a single rank's are the whole."""
        if self._world.size == 1:
            return x
        if len({*widths}) <= 1:
            return self._world.all_gather(x).transpose(0, 1).reshape(len(x), -1)
        padded = x.new_zeros(len(x), max(widths))
        padded[:, : x.shape[1]] = x
        everyone = self._world.all_gather(padded)
        parts = zip(everyone, widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], dim=1)

    def gather_and_norm(
        self, x: torch.Tensor, finish: Finish, widths: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank adds and norms every row, once it has the columns."""
        return ops.fold_and_norm(whole_sum(self.gather_columns(x, widths)), finish)

    def everyones(self, sums: PartialSums, plan: FoldPlan | None = None) -> PartialSums:
        """The sums of all ranks under one root, equal on every rank; plan: as `fold_and_norm`."""
        plan, world = self._plan if plan is None else plan, self._world
        if isinstance(plan.final, Slot):
            # One rank's root is the whole tree.
            return PartialSums(sums.values, (sums.roots[plan.final.index],))
        sent = ops.fold_roots(sums, plan.slots)
        if sent.shape[1] < self._two_shot_rows:
            return gathered_sums(world.all_gather(sent), plan.final)
        return whole_sum(self._two_shot(sent, plan))

    def _two_shot(self, sent: torch.Tensor, plan: FoldPlan) -> torch.Tensor:
        """Roots [slots, M, N] -> [M, N]; blocks are of one size, padded with any bits."""
        world, (slots, rows, columns) = self._world, sent.shape
        share = -(-rows // world.size)
        padded = sent
        if share * world.size != rows:
            padded = sent.new_zeros(slots, share * world.size, columns)
            padded[:, :rows] = sent
        blocks = padded.view(slots, world.size, share, columns).transpose(0, 1).contiguous()
        mine = ops.fold_final(world.all_to_all(blocks), plan.final)
        return world.all_gather(mine).view(-1, columns)[:rows]
