"""Columns of all ranks gathered over peer memory, for row layers whose ranks add nothing.

    exchange = open_columns("auto", plan, world, rows, (widest, hidden), dtype, device)
    x = exchange.gather_columns(mixed)                             # eagerly or in a CUDA graph
    h, y = exchange.gather_and_norm(y, finish)

One allocation a rank holds two buffers that exchanges of both kinds take in turn; a buffer has room
for the widest rows of a piece. Steps of more rows go piece by piece. For small payloads, lost peers
and streams see `peer_carrier`.
"""

import torch

from tpdet.comm.exchange.columns import ColumnExchange
from tpdet.comm.exchange.fold import GatherExchange, WholeStream
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.comm.exchange.peer_memory import PeerMemory, memory_for
from tpdet.comm.exchange.slot_layout import aligned
from tpdet.comm.world.world import World
from tpdet.errors import UsageError
from tpdet.kernels.cuda.exchange.arguments import Buffers
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan

PIECE_ROWS = 4096
BUFFER_BYTES = 1 << 28
"""Cap of a buffer; a piece is halved until its widest rows fit."""


class PeerColumns(WholeStream):
    """An exchange of columns whose ranks write into each other's memory; all on one host.

    The inputs' exchange stands between two products of the same rows: it overlaps nothing.
    """

    def __init__(
        self,
        memory: PeerMemory,
        rows: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        piece_rows: int = PIECE_ROWS,
        carrier: PeerCarrier | None = None,
    ) -> None:
        """rows: the most of a step; widths: values of the widest whole row, and of the stream's.

        carrier: that of another exchange in the same steps. Collective: every rank makes its own
        together.
        """
        self.carrier = PeerCarrier(memory) if carrier is None else carrier
        self._ranks = memory.world.size
        self._dtype = dtype
        row = max(widths) * dtype.itemsize
        self.piece_rows = min(rows, piece_rows)
        while self.piece_rows > 1 and self.piece_rows * row > BUFFER_BYTES:
            self.piece_rows = -(-self.piece_rows // 2)
        room = aligned(self.piece_rows * row)
        self._buffers = memory.allocate((2 * room // 4,), torch.int32)
        self._buffers.own.fill_(-1)  # armed
        self._both = Buffers(0, room)
        self._peers = self.carrier.peers(self._buffers.addresses)
        memory.settle()

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...] = ()) -> torch.Tensor:
        """A copy of all ranks' columns, in one kernel a piece. Raises UsageError."""
        from tpdet.kernels.cuda.exchange import columns as peer_columns

        _check_widths(widths)
        self._check_dtype(x)
        x = x.contiguous()
        whole = x.new_empty(len(x), self._ranks * x.shape[1])
        for rows in self._pieces(len(x)):
            peer_columns.run_gather_columns(x[rows], whole[rows], self._peers, self._both)
        return whole

    def gather_and_norm(
        self, x: torch.Tensor, finish: Finish, widths: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank adds and norms every row, in the kernel that takes the columns."""
        from tpdet.kernels.cuda.exchange.columns import run_gather_and_norm

        _check_widths(widths)
        self._check_dtype(x)
        x, residual = x.contiguous(), finish.residual
        if residual.stride(1) != 1:
            finish = finish._replace(residual=residual.contiguous())
        h = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
        y = torch.empty(h.shape, dtype=finish.dtype, device=h.device)
        for rows in self._pieces(len(x)):
            out = h[rows], y[rows]
            run_gather_and_norm(x[rows], finish.of_rows(rows), out, self._peers, self._both)
        return h, y

    def _check_dtype(self, x: torch.Tensor) -> None:
        if x.dtype != self._dtype:
            raise ValueError(f"rows of {x.dtype}: this exchange was made for {self._dtype}")

    def _pieces(self, rows: int) -> list[slice]:
        """A step's rows in pieces of nearly one size."""
        size = -(-rows // max(1, -(-rows // self.piece_rows)))
        return [slice(first, min(first + size, rows)) for first in range(0, rows, max(size, 1))]


def _check_widths(widths: tuple[int, ...]) -> None:
    if len({*widths}) > 1:
        raise UsageError(
            f"columns {', '.join(map(str, widths))} of the ranks are not equally many: over peer "
            "memory row layers gather needs that; use --row-layers fold, or --transport gather"
        )


def open_columns(
    transport: str,
    plan: FoldPlan,
    world: World,
    rows: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> ColumnExchange:
    """The exchange of columns for a transport; as `open_exchange` of sums.

    widths: values of the widest row that is gathered, and of the residual stream's. Collective.
    Raises UsageError when "peer" cannot be had.
    """
    memory = memory_for(transport, world, device)
    if memory is None:
        return GatherExchange(plan, world)
    return PeerColumns(memory, rows, widths, dtype)
