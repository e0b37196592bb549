"""Tiles of lanes that a shared expert is added to, by a step's rows; they show in time alone.

Few rows take the small tiles of `shared_lanes.py`, and many the programs of `streamed_lanes.py`
where these fit (`streams`). Elsewhere many rows take the largest tile: on GPUs that are no Hopper,
and there of leaves of 128 inputs, of a width that 64 does not divide, of lanes or choices that are
no power of two, of more than 8 lanes, whose sums are more than registers hold, and of more than
shared memory holds, as 8 leaves of 64 inputs beside 16 choices.
"""

from functools import cache
from typing import NamedTuple

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.streamed_lanes import COLUMNS, ROWS, WARPS
from tpdet.kernels.cuda.launch.sizes import cdiv

_MORE_BYTES = 2048  # barriers, and what lies unused between buffers
_MOST_LANES = 8  # whose sums stay in registers: 16 spill up to 2,840 bytes a thread


class LaneTile(NamedTuple):
    """Rows and columns of a program, its warps, and how many leaves are read ahead of their chain.

    ahead: None of the programs of `streamed_lanes.py`, which read a whole block of columns ahead.
    """

    rows: int
    columns: int
    warps: int
    ahead: int | None

    @property
    def streamed(self) -> bool:
        """Whether it is that of `streamed_lanes.py`."""
        return self.ahead is None


_FEW = ((32, LaneTile(16, 16, 4, 8)), (128, LaneTile(16, 32, 4, 1)))
"""By the rows up to which a tile is taken."""
_MANY = LaneTile(64, 64, 16, 1)
STREAMED = LaneTile(ROWS.value, COLUMNS.value, WARPS.value, None)
"""The tile of many rows where `streams` is true: an H200 takes 159 us at 8,192 rows where `_MANY`
takes 390, and 13.5 where it takes 16.3 at 256."""


def streams(width: int, held: int, leaf: int, chosen: int, device: torch.device) -> bool:
    """Whether `STREAMED` takes lanes of `width` columns, of `held` leaves of so many inputs."""
    gpu, rows, columns = hardware.gpu_of(device), STREAMED.rows, STREAMED.columns
    operands = held * leaf * (rows + columns) * 2
    choices = chosen * rows * (2 * columns + 4 * held + 8)
    room = operands + choices + _MORE_BYTES <= gpu.shared_bytes
    cut = leaf in (16, 32, 64) and held <= _MOST_LANES and width % columns == 0
    powers = all(count & count - 1 == 0 for count in (held, chosen))  # Gluon has no other shapes
    return gpu.wgmma and room and cut and powers


def tile_for(rows: int, streamed: bool = False) -> LaneTile:
    """What steps of so many rows take; streamed: whether `streams` is true of the operands."""
    many = STREAMED if streamed else _MANY
    return next((tile for most, tile in _FEW if rows <= most), many)


def tiles(streamed: bool = False) -> list[LaneTile]:
    """All that `tile_for` names."""
    return [*(tile for _, tile in _FEW), _MANY] + [STREAMED] * streamed


@cache
def programs_of_rows(blocks: int, parts: int, programs: int) -> int:
    """How many programs share the `parts` blocks of columns of each block of rows, of `blocks`.

    As few rounds of `programs` at a time as can be, each part and each start counted as one.
    """
    rounds = lambda count: cdiv(blocks * count, programs) * (cdiv(parts, count) + 1)
    return min(range(1, parts + 1), key=rounds)
