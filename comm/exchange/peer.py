"""The fixed-order reduction over peer memory: one kernel an exchange, any fold order, same bits.

    exchange = PeerExchange(plan, memory, rows, hidden, dtype)     # or `open_exchange`
    h, y = exchange.fold_and_norm(sums, finish)            # eagerly or in a CUDA graph
    exchange.carrier.report()                               # last in the step's stream

All exchanges of a rank run one after the other (one stream, or several that wait for each other),
and all ranks call the same ones in the same order. What the shared memory holds is in
`slot_layout`. Few rows take the one-shot (`one_shot.py`), some more a two-shot with a program a row
(`spread.py`), then the two-shot (`two_shot.py`), and many the one that pushes finished rows to
where they are read (`direct.py`); the bits do not depend on it. Steps of more rows than a piece
holds go piece by piece. Who owns a row follows from the number of rows, so a step's residual stream
stays with its owners.
"""

from dataclasses import dataclass, replace

import torch

from tpdet.comm.exchange.fold import Done, Pending
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.comm.exchange.peer_memory import PeerMemory
from tpdet.comm.exchange.slot_layout import (
    DIRECT_ROWS,
    PIECE_ROWS,
    SPREAD_ROWS,
    STREAM_ROWS,
    SlotLayout,
    by_ranks,
)
from tpdet.kernels.cuda.exchange.arguments import Peers, everyone_owns
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

OVERLAP_PROGRAMS = {2: 20, 4: 24, 8: 32}
"""By ranks: programs, each on a multiprocessor of its own, of an exchange that runs under products.

Fewer make the exchange the longer of the two, more take from the products what it gains. Prefill of
a Qwen3-8B shape on 4 H200s: 12 gave 87,000, 16 104,000, 20 109,000, 24 111,000 tokens/s."""

OVERLAP_TILE = 2
"""Rows of such a program at once: it mostly waits for memory."""


@dataclass(frozen=True)
class _Overlapped:
    """A begun exchange. What its kernel reads is kept until the reader's stream has waited."""

    h: torch.Tensor
    y: torch.Tensor
    done: torch.cuda.Event
    kept: tuple[PartialSums, Finish]

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
        direct_rows: int = DIRECT_ROWS,
    ) -> None:
        """rows: the most of a step. Collective: every rank makes its own together."""
        self.carrier = PeerCarrier(memory)
        self.plan = plan
        self._world = memory.world
        self._dtype = dtype
        self.layout = SlotLayout(
            memory.world.size,
            plan.slots,
            rows,
            hidden,
            dtype,
            one_shot_rows,
            piece_rows,
            direct_rows,
        )
        self.spread_rows = SPREAD_ROWS
        shared = memory.allocate((self.layout.bytes // 4,), torch.int32)
        shared.own.fill_(-1)  # armed
        shared.own[self.layout.flag_start // 4 :].zero_()  # no flag is raised
        self._shared = shared
        self._one = self.carrier.peers(shared.addresses)
        self._two = self.carrier.peers(shared.addresses)
        self._stream = self.carrier.peers(shared.addresses)
        self._overlap_stream: torch.cuda.Stream | None = None
        memory.settle()

    def fold_and_norm(
        self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h holds this rank's rows in a step of many rows, and every row in one of few.

        y of a step of many rows stays as it is until the exchange after the next is launched.
        """
        return self._launch(sums, finish, plan, self._two)

    def stream_rows(
        self, hidden_MH: torch.Tensor, numbers_R: torch.Tensor, parts: tuple[int, ...]
    ) -> torch.Tensor:
        """The rows' owners push them, in one kernel for `STREAM_ROWS` of them."""
        from tpdet.kernels.cuda.exchange.owned_rows import run_push_owned_rows

        pieces = tuple((rows, len(self.layout.pieces(rows)[0])) for rows in parts)
        hidden_MH = hidden_MH.contiguous()
        whole = hidden_MH.new_empty(len(numbers_R), hidden_MH.shape[1])
        for first in range(0, len(numbers_R), STREAM_ROWS):
            some = slice(first, first + STREAM_ROWS)
            of = pieces, self._stream, self.layout.stream
            run_push_owned_rows(hidden_MH, numbers_R[some], whole[some], *of)
        return whole

    @property
    def overlap_programs(self) -> int:
        """A few: one for each program."""
        return by_ranks(OVERLAP_PROGRAMS, self._world.size)

    def begin(self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None) -> Pending:
        """The exchange on a stream of its own. Nothing else may exchange before `result`, but a
        second exchange that is begun follows the first."""
        two = replace(self._two, programs=self.overlap_programs, tile=OVERLAP_TILE)
        if sums.values.device.type == "cpu":  # a rehearsal of a GPU that is not there: no streams
            return Done(*self._launch(sums, finish, plan, two))
        stream = torch.cuda.current_stream()
        if self._overlap_stream is None:
            self._overlap_stream = torch.cuda.Stream(stream.device)
        self._overlap_stream.wait_stream(stream)
        with torch.cuda.stream(self._overlap_stream):
            out = self._launch(sums, finish, plan, two)
            done = torch.cuda.Event()
            done.record()
        return _Overlapped(*out, done, (sums, finish))

    def _launch(
        self, sums: PartialSums, finish: Finish, plan: FoldPlan | None, two: Peers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan, residual = self.plan if plan is None else plan, finish.residual
        if finish.dtype != self._dtype or residual.dtype != torch.float32:
            raise ValueError(
                f"a stream of {residual.dtype} normed to {finish.dtype}: this exchange was made "
                f"for one of {torch.float32} and {self._dtype}"
            )
        if residual.stride(1) != 1:
            finish = finish._replace(residual=residual.contiguous())
        h = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
        values = sums.values.contiguous()
        if self.takes_direct(len(residual)):
            return h, self._run_direct(PartialSums(values, sums.roots), finish, h, plan, two)
        y = torch.empty(h.shape, dtype=self._dtype, device=h.device)
        for piece in self.layout.pieces(len(residual)):
            rows = slice(piece.start, piece.stop)
            part = PartialSums(values[:, rows], sums.roots)
            self._run(part, finish.of_rows(rows), (h[rows], y[rows]), plan, two)
        return h, y

    def _run_direct(
        self, sums: PartialSums, finish: Finish, h: torch.Tensor, plan: FoldPlan, two: Peers
    ) -> torch.Tensor:
        from tpdet.kernels.cuda.exchange.direct import run_two_shot_direct

        layout, (m, n), size = self.layout, h.shape, self._dtype.itemsize
        turn = self.carrier.next_turn() % 2
        begin = layout.direct_start + turn * layout.piece_rows * n * size
        slots = layout.roots, layout.flags
        run_two_shot_direct(sums, finish, h, plan, two, *slots, begin // size)
        words = self._shared.own[begin // 4 :][: m * n * size // 4]
        return words.view(self._dtype).view(m, n)

    def _run(
        self,
        sums: PartialSums,
        finish: Finish,
        out: tuple[torch.Tensor, torch.Tensor],
        plan: FoldPlan,
        two: Peers,
    ) -> None:
        from tpdet.kernels.cuda.exchange import one_shot as peer_fold
        from tpdet.kernels.cuda.exchange import spread as peer_spread
        from tpdet.kernels.cuda.exchange import two_shot as peer_two_shot

        layout, rows = self.layout, len(finish.residual)
        if self.takes_one_shot(rows):
            peer_fold.run_one_shot(sums, finish, out, plan, self._one, layout.one_shot)
            return
        spread = rows <= self.spread_rows
        run = peer_spread.run_two_shot_spread if spread else peer_two_shot.run_two_shot
        run(sums, finish, out, plan, two, (layout.roots, layout.finished))

    def takes_direct(self, rows: int) -> bool:
        """Whether a step goes whole, its finished rows to where they are read."""
        layout = self.layout
        return layout.direct_rows <= rows <= layout.piece_rows and not self.takes_one_shot(rows)

    def takes_one_shot(self, rows: int) -> bool:
        """Which kernel a piece of `rows` rows goes to; the bits do not depend on it."""
        return rows <= self.layout.one_shot_rows or not everyone_owns(rows, self._world.size)
