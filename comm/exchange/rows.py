"""Whole rows of logits for ranks that each hold some columns: every rank gets its share of rows.

    exchange = open_row_exchange(carrier, columns, rows)  # collective, before a step runs
    mine = exchange.whole_rows(x)        # x [R, columns] of every rank -> [share, ranks * columns]
    answers = exchange.all_gather(own).flatten(0, 1)[row_places(R, ranks)]

Shares are of one size, ceil(R / ranks), and may overlap at the end: so nobody is without a row,
which the protocol over peer memory needs, and no row is padding. Bytes are copied, none is added.
"""

from typing import Protocol

import torch

from tpdet.comm.exchange.carrier import Carrier
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.comm.exchange.slot_layout import aligned
from tpdet.comm.world.world import World
from tpdet.kernels.cuda.exchange.arguments import Buffers


class RowExchange(Protocol):
    """Rows cut by columns become whole rows, cut by rows. Called on every rank, in one order."""

    most: int
    """Rows R that are taken at once."""

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [R, columns] of every rank -> this rank's rows [share, ranks * columns]."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's small `x`, copied bit for bit: [ranks, *x.shape]."""


def share_of(rows: int, ranks: int) -> int:
    """How many rows each rank gets of `rows`."""
    return -(-rows // ranks)


def first_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """The first row of each rank's share."""
    share = share_of(rows, ranks)
    return tuple(min(rank * share, rows - share) for rank in range(ranks))


def row_places(rows: int, ranks: int) -> list[int]:
    """Where each row stands among all ranks' shares, one after the other."""
    share, firsts = share_of(rows, ranks), first_rows(rows, ranks)
    return [row // share * share + row - firsts[row // share] for row in range(rows)]


class GatherRows:
    """The world's all-to-all: any transport, any device."""

    def __init__(self, world: World, rows: int) -> None:
        """rows: the most at once."""
        self.most = rows
        self._world = world

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """As RowExchange. Raises PeerLostError."""
        rows, ranks = len(x), self._world.size
        share = share_of(rows, ranks)
        blocks = torch.stack([x[first : first + share] for first in first_rows(rows, ranks)])
        return self._world.all_to_all(blocks).transpose(0, 1).reshape(share, -1)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The world's all-gather. Raises PeerLostError."""
        return self._world.all_gather(x)


class PeerRows:
    """Rows pushed into the memory of the ranks that get them; all on one host."""

    def __init__(self, carrier: PeerCarrier, columns: int, rows: int) -> None:
        """columns: of a rank; rows: the most at once; carrier: reports lost peers.

        Collective: every rank makes its own together.
        """
        memory = carrier.memory
        ranks = memory.world.size
        self.most = rows
        self._carrier = carrier
        room = aligned(share_of(rows, ranks) * ranks * columns * 4)
        self._buffers = memory.allocate((2 * room // 4,), torch.int32)
        self._buffers.own.fill_(-1)  # armed
        self._both = Buffers(0, room)
        self._peers = carrier.peers(self._buffers.addresses)
        memory.settle()

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """As RowExchange, in one kernel. What a lost peer leaves is for the exchange's `check`.

        Raises ValueError for what is not fp32 and for more than `most` rows.
        """
        from tpdet.kernels.cuda.exchange import rows as peer_rows

        if x.dtype != torch.float32 or len(x) > self.most:
            raise ValueError(
                f"{len(x)} rows of {x.dtype}: this exchange was made for {self.most} of fp32"
            )
        ranks = self._peers.ranks
        mine = x.new_empty(share_of(len(x), ranks), ranks * x.shape[1])
        peer_rows.run_take_rows(x.contiguous(), mine, self._peers, self._both)
        return mine

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The all-gather over peer memory."""
        return self._carrier.all_gather(x)


def open_row_exchange(carrier: Carrier, columns: int, rows: int) -> RowExchange:
    """An exchange of whole rows, for up to `rows` of `columns` fp32 values a rank. Collective.

    `check` of the carrier also reports peers that were lost in it.
    """
    if isinstance(carrier, PeerCarrier):
        return PeerRows(carrier, columns, rows)
    return GatherRows(carrier.world, rows)
