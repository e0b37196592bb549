"""Sampling parameters of many rows by columns: an object a row would take the host too long."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from tpdet.kernels.inputs.row_params import RowParams

_ROW = struct.Struct("<Qqdqdd")
_FIELDS = _ROW.size // 8
_SEED, _CHOICE, _WAY = range(3)  # columns; the others are a `Way`


class Way(NamedTuple):
    """How a row is sampled, as in `RowParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def pack_row(
    seed: int, choice: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> bytes:
    """What `PlainRows` takes of a row, but for its position."""
    return _ROW.pack(seed, choice, temperature, top_k, top_p, min_p)


class PlainRows(Sequence[RowParams]):
    """Rows without bias, penalties and lists of ids. As a sequence it makes `RowParams`."""

    def __init__(self, packed: bytes, positions: np.ndarray | Sequence[int]) -> None:
        """packed: `pack_row` of R rows, one after another; positions: int64 [R]."""
        self._numbers = np.frombuffer(packed, "<i8").reshape(-1, _FIELDS)
        self.positions = np.asarray(positions, np.int64)
        if len(self._numbers) != len(self.positions):
            raise ValueError(f"{len(self._numbers)} rows have {len(self.positions)} positions")

    @property
    def seeds(self) -> np.ndarray:
        """uint64 [R]."""
        return self._numbers[:, _SEED].view(np.uint64)

    @property
    def choices(self) -> np.ndarray:
        """int64 [R]."""
        return self._numbers[:, _CHOICE]

    @property
    def temperatures(self) -> np.ndarray:
        """fp64 [R]."""
        return self._numbers[:, _WAY].view(np.float64)

    def ways(self) -> tuple[list[Way], np.ndarray]:
        """Each way that any row is sampled, and which of them each row is: int64 [R]."""
        ways = self._numbers[:, _WAY:]
        if (ways == ways[:1]).all():
            return [_way(row) for row in ways[:1]], np.zeros(len(self), np.int64)
        found, which = np.unique(ways, axis=0, return_inverse=True)
        return [_way(row) for row in found], which.reshape(-1)

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> RowParams: ...
    @overload
    def __getitem__(self, index: slice) -> "PlainRows": ...
    def __getitem__(self, index: int | slice) -> "RowParams | PlainRows":
        if isinstance(index, slice):
            return PlainRows(self._numbers[index].tobytes(), self.positions[index])
        way, seed = _way(self._numbers[index, _WAY:]), int(self.seeds[index])
        position, choice = int(self.positions[index]), int(self.choices[index])
        return RowParams(way.temperature, seed, position, choice, *way[1:])


def _way(numbers: np.ndarray) -> Way:
    temperature, _, top_p, min_p = numbers.view(np.float64).tolist()
    return Way(temperature, int(numbers[1]), top_p, min_p)
