"""The fixed-order reduction over peer memory: one kernel an exchange, any fold order, same bits.

    exchange = open_exchange("auto", plan, world, rows, hidden, dtype, device)
    h, y = exchange.fold_and_norm(sums, residual, weight, eps)     # eagerly or in a CUDA graph
    everyones = exchange.all_gather(x)                             # small payloads
    exchange.report()                                              # last in the step's stream
    exchange.check()                                               # once that has run: lost a peer?

All exchanges of a rank run one after the other (one stream, or several that wait for each other),
and all ranks call the same ones in the same order. One allocation a rank holds the slots,
everything doubled for exchanges that alternate:

    one-shot roots   [2, ranks, slots, one-shot rows, hidden] fp32
    two-shot roots   [2, ranks, slots, share of a piece, hidden] fp32
    two-shot y       [2, rows of a piece, hidden] in the model's dtype
    all-gather       [2, ranks, words] of 8 bytes

Steps of more rows than a piece holds go piece by piece. Who owns a row follows from the number of
rows, so a step's residual stream stays with its owners.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpdet.comm.fold import Exchange, GatherExchange, Pending
from tpdet.comm.peer_memory import PeerMemory, memory_for
from tpdet.comm.world import World
from tpdet.errors import PeerLostError
from tpdet.kernels.order import FoldPlan, Slot
from tpdet.kernels.partial_sums import PartialSums

if TYPE_CHECKING:
    from tpdet.kernels.cuda.peer_fold import Peers

ONE_SHOT_ROWS = {2: 96, 4: 48, 8: 16}
"""By ranks: up to so many rows of 4,096 values the one-shot is taken (8: not measured)."""

PIECE_ROWS = 8192
SLOT_BYTES = 1 << 30
"""Cap of the two-shot's root slots; a piece is halved until they fit."""

GATHER_WORDS = 1 << 16
PROGRAMS = 132
"""Programs of an exchange, all of which must be on the GPU at once."""

PROGRAMS_ASIDE = {2: 20, 4: 24, 8: 32}
"""By ranks: programs, each on a multiprocessor of its own, of an exchange that runs under products.

With 16 the exchange was the longer of the two; these are where a model of both times meets."""

_ALIGNED = 1024  # bytes


class SlotLayout:
    """Where the parts of a rank's shared memory begin; sizes follow from the model and the plan."""

    def __init__(
        self, ranks: int, slots: int, rows: int, hidden: int, dtype: torch.dtype,
        one_shot_rows: int | None = None, piece_rows: int = PIECE_ROWS,
    ) -> None:  # fmt: skip
        """rows: the most of a step."""
        if one_shot_rows is None:
            one_shot_rows = _by_ranks(ONE_SHOT_ROWS, ranks) * 4096 // hidden
        # A two-shot needs a row for every rank to own.
        self.one_shot_rows = max(one_shot_rows, ranks * ranks)
        piece = min(rows, piece_rows)
        while piece > 256 and self._root_bytes(ranks, slots, piece, hidden) > SLOT_BYTES:
            piece = -(-piece // 2)
        self.piece_rows = piece
        self.share_rows = -(-piece // ranks)
        self.one_shot_start = 0
        one_shot = 8 * ranks * slots * self.one_shot_rows * hidden
        self.roots_start = _aligned(one_shot)
        self.y_start = _aligned(self.roots_start + self._root_bytes(ranks, slots, piece, hidden))
        self.gather_start = _aligned(self.y_start + 2 * piece * hidden * dtype.itemsize)
        self.bytes = self.gather_start + 16 * ranks * GATHER_WORDS

    @staticmethod
    def _root_bytes(ranks: int, slots: int, piece: int, hidden: int) -> int:
        return 8 * ranks * slots * -(-piece // ranks) * hidden

    def pieces(self, rows: int) -> list[range]:
        """A step's rows in pieces of nearly one size."""
        count = -(-rows // self.piece_rows)
        size = -(-rows // max(count, 1))
        return [range(first, min(first + size, rows)) for first in range(0, rows, max(size, 1))]


@dataclass(frozen=True)
class _Aside:
    """A begun exchange. What its kernel reads is kept until the reader's stream has waited."""

    h: torch.Tensor
    y: torch.Tensor
    done: torch.cuda.Event
    kept: tuple[PartialSums, torch.Tensor]

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.cuda.current_stream().wait_event(self.done)
        return self.h, self.y


class PeerExchange:
    """An exchange whose ranks write into each other's memory; all on one host."""

    def __init__(
        self,
        plan: FoldPlan,
        memory: PeerMemory,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        one_shot_rows: int | None = None,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        """rows: the most of a step. Collective: every rank makes its own together."""
        from tpdet.kernels.cuda.peer_fold import Peers

        self.memory: PeerMemory | None = memory
        self._plan = plan
        self._world = memory.world
        self._dtype = dtype
        ranks, device = memory.world.size, memory.device
        self.layout = SlotLayout(ranks, plan.slots, rows, hidden, dtype, one_shot_rows, piece_rows)
        shared = memory.allocate((self.layout.bytes // 4,), torch.int32)
        shared.own.fill_(-1)  # armed
        shared.own[self.layout.gather_start // 4 :].zero_()  # no tag
        self._shared = shared
        # On the GPU: a program that waits looks at it, and over PCIe thousands of threads' looks
        # cost 50 ms a time. The host's copy is `_seen`.
        self._control = torch.zeros(2, dtype=torch.int64, device=device)
        self._seen = memory.host_words(1)
        self._counters = torch.zeros(3, 2, dtype=torch.int64, device=device)
        programs = min(memory.multiprocessors, PROGRAMS)
        self._one, self._two, self._gather = (
            Peers(self._world.rank, shared.addresses, counter, self._control, programs)
            for counter in self._counters
        )
        self._aside: torch.cuda.Stream | None = None
        self.set_timeout(self._world.timeout)
        memory.settle()

    def fold_and_norm(
        self, sums: PartialSums, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h holds this rank's rows in a step of many rows, and every row in one of few."""
        out = self._out(residual)
        self._launch(sums, residual, weight, eps, out, self._two)
        return out

    @property
    def aside(self) -> int:
        """A few: one for each program."""
        return _by_ranks(PROGRAMS_ASIDE, self._world.size)

    def begin(
        self, sums: PartialSums, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pending:
        """The exchange on a stream of its own. Nothing else may exchange before `result`, but a
        second exchange that is begun follows the first."""
        out, stream = self._out(residual), torch.cuda.current_stream()
        if self._aside is None:
            self._aside = torch.cuda.Stream(stream.device)
        self._aside.wait_stream(stream)
        with torch.cuda.stream(self._aside):
            two = replace(self._two, programs=self.aside)
            self._launch(sums, residual, weight, eps, out, two)
            done = torch.cuda.Event()
            done.record()
        return _Aside(*out, done, (sums, residual))

    def _out(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        return h, torch.empty_like(h)

    def _launch(
        self, sums: PartialSums, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        out: tuple[torch.Tensor, torch.Tensor], two: "Peers",
    ) -> None:  # fmt: skip
        if residual.dtype != self._dtype:
            raise ValueError(f"rows of {residual.dtype}: this exchange was made for {self._dtype}")
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
        values, (h, y) = sums.values.contiguous(), out
        for piece in self.layout.pieces(len(residual)):
            rows = slice(piece.start, piece.stop)
            part = PartialSums(values[:, rows], sums.roots)
            self._run(part, residual[rows], weight, eps, (h[rows], y[rows]), two)

    def _run(
        self, sums: PartialSums, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        out: tuple[torch.Tensor, torch.Tensor], two: "Peers",
    ) -> None:  # fmt: skip
        from tpdet.kernels.cuda import peer_fold, peer_two_shot

        layout, rows = self.layout, len(residual)
        if self.takes_one_shot(rows):
            place = layout.one_shot_start // 4, layout.one_shot_rows
            peer_fold.run_one_shot(sums, residual, weight, eps, out, self._plan, self._one, place)
            return
        y_start = layout.y_start // out[1].element_size()
        where = layout.roots_start // 4, layout.share_rows, y_start, layout.piece_rows
        peer_two_shot.run_two_shot(sums, residual, weight, eps, out, self._plan, two, where)

    def owned_rows(self, rows: int) -> list[range]:
        """The rows of h that this rank gets in a step of `rows` rows."""
        owned = []
        for piece in self.layout.pieces(rows):
            if self.takes_one_shot(len(piece)):
                owned.append(piece)
            else:
                share = -(-len(piece) // self._world.size)
                owned.append(piece[self._world.rank * share : (self._world.rank + 1) * share])
        return owned

    def takes_one_shot(self, rows: int) -> bool:
        """Which kernel a piece of `rows` rows goes to; the bits do not depend on it."""
        ranks = self._world.size
        everyone_owns = (ranks - 1) * -(-rows // ranks) < rows
        return rows <= self.layout.one_shot_rows or not everyone_owns

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks, *x.shape]; sizes that are no whole words of 4 bytes go through the world."""
        from tpdet.kernels.cuda.peer_gather import run_gather

        if x.numel() == 0 or (x.numel() * x.element_size()) % 4:
            return self._world.all_gather(x)
        words = x.contiguous().view(-1).view(torch.int32)
        place = self.layout.gather_start // 8, GATHER_WORDS
        parts = []
        for part in words.split(GATHER_WORDS):
            parts.append(part.new_empty(self._world.size, len(part)))
            run_gather(part, parts[-1], self._gather, place)
        gathered = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return gathered.view(x.dtype).view(self._world.size, *x.shape)

    def report(self) -> None:
        """Begin to copy to the host what `check` reads, after what the stream holds so far."""
        self._seen.copy_(self._control[:1], non_blocking=True)

    def check(self) -> None:
        """Raise PeerLostError naming the rank; the exchange, like its world, is then broken."""
        found = int(self._seen[0])
        if found:
            number, lost = divmod(found, 256)
            raise PeerLostError(
                f"rank {self._world.rank} of {self._world.size} waited {self._timeout:g} s for "
                f"rank {lost - 1} in exchange {number} over peer memory: it is lost or hangs"
            )

    def set_timeout(self, seconds: float) -> None:
        """Bound each wait from now on, also those of graphs that are captured already."""
        self._timeout = seconds
        self._control[1:].copy_(torch.tensor([int(min(seconds, 1e9) * 1e9)]))


def open_exchange(
    transport: str,
    plan: FoldPlan,
    world: World,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    """The exchange for a transport: "gather", "peer", or "auto": peer memory where there is some.

    rows: the most of a step. Collective. Raises UsageError when "peer" cannot be had.
    """
    memory = memory_for(transport, world, device)
    if memory is None or isinstance(plan.final, Slot):
        return GatherExchange(plan, world)
    return PeerExchange(plan, memory, rows, hidden, dtype)


def _by_ranks(table: dict[int, int], ranks: int) -> int:
    """A table's value for the next larger number of ranks it has, or for its largest."""
    return next((value for size, value in sorted(table.items()) if size >= ranks), table[8])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
