"""Where the parts of a rank's shared memory for exchanges lie.

One allocation a rank holds the slots, everything doubled for exchanges that alternate:

    one-shot roots   [2, ranks, slots, one-shot rows, hidden] fp32
    two-shot roots   [2, ranks, slots, share of a piece, hidden] fp32
    two-shot y       [2, rows of a piece, hidden] in the model's dtype
    stream rows      [2, stream rows, hidden] fp32, and a word of each rank behind them
    direct flags     [ranks, flags] of 4 bytes
    direct y         [2, rows of a piece, hidden] in the model's dtype, in steps of many rows

The slots of the all-gather are the carrier's (`peer_carrier.py`).
"""

import torch

from tpdet.kernels.cuda.exchange.arguments import Buffers, Flags, Slots

ONE_SHOT_ROWS = {2: 96, 4: 24, 8: 16}
"""By ranks: the most rows of 4,096 values that take the one-shot (8: not measured)."""

PIECE_ROWS = 8192
SLOT_BYTES = 1 << 30
"""Cap of the two-shot's root slots; a piece is halved until they fit."""

SPREAD_ROWS = 128
"""The most rows for which a two-shot has a program a row."""

DIRECT_ROWS = 1024
"""The fewest rows that are pushed, once finished, to where they are read."""

STREAM_ROWS = 64
"""Rows of the stream that are pushed to every rank at once."""

FLAGS = 256
"""Flags that a rank raises on each peer: at least as many as programs."""

_ALIGNED = 1024  # bytes


class SlotLayout:
    """Where the parts of a rank's shared memory begin; sizes follow from the model and the plan."""

    def __init__(
        self,
        ranks: int,
        slots: int,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        one_shot_rows: int | None = None,
        piece_rows: int = PIECE_ROWS,
        direct_rows: int = DIRECT_ROWS,
    ) -> None:
        """rows: the most of a step."""
        if one_shot_rows is None:
            one_shot_rows = by_ranks(ONE_SHOT_ROWS, ranks) * 4096 // hidden
        # A two-shot needs a row for every rank to own.
        self.one_shot_rows = max(one_shot_rows, ranks * ranks)
        piece = min(rows, piece_rows)
        while piece > 256 and self._root_bytes(ranks, slots, piece, hidden) > SLOT_BYTES:
            piece = -(-piece // 2)
        self.piece_rows = piece
        self.share_rows = -(-piece // ranks)
        self.one_shot_start = 0
        one_shot = 8 * ranks * slots * self.one_shot_rows * hidden
        self.roots_start = aligned(one_shot)
        self.y_start = aligned(self.roots_start + self._root_bytes(ranks, slots, piece, hidden))
        y_bytes = 2 * piece * hidden * dtype.itemsize
        self.stream_start = aligned(self.y_start + y_bytes)
        room = aligned(4 * (STREAM_ROWS * hidden + ranks))
        self.flag_start = aligned(self.stream_start + 2 * room)
        self.direct_start = aligned(self.flag_start + 4 * ranks * FLAGS)
        self.bytes = self.direct_start + (y_bytes if rows >= direct_rows else 0)
        self.direct_rows = direct_rows
        self.one_shot = Slots(self.one_shot_start // 4, self.one_shot_rows, slots)
        self.roots = Slots(self.roots_start // 4, self.share_rows, slots)
        self.finished = Slots(self.y_start // dtype.itemsize, self.piece_rows)
        self.stream = Buffers(self.stream_start, room)
        self.flags = Flags(self.flag_start // 4, FLAGS)

    @staticmethod
    def _root_bytes(ranks: int, slots: int, piece: int, hidden: int) -> int:
        return 8 * ranks * slots * -(-piece // ranks) * hidden

    def pieces(self, rows: int) -> list[range]:
        """A step's rows in pieces of nearly one size."""
        count = -(-rows // self.piece_rows)
        size = -(-rows // max(count, 1))
        return [range(first, min(first + size, rows)) for first in range(0, rows, max(size, 1))]


def by_ranks(table: dict[int, int], ranks: int) -> int:
    """A table's value for the next larger number of ranks it has, or for its largest."""
    return next((value for size, value in sorted(table.items()) if size >= ranks), table[8])


def aligned(size: int) -> int:
    """`size` bytes, rounded up to where the next part may begin."""
    return -(-size // _ALIGNED) * _ALIGNED
