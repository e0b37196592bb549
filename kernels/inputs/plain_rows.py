"""Sampling parameters of many rows by columns: an object a row would take the host too long."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from tpdet.kernels.inputs.row_params import RowParams

_ROW = struct.Struct("<Qqdqdd")
FIELDS = _ROW.size // 8
"""int64 values of `pack_row`."""
_SEED, _CHOICE, _TEMPERATURE = range(3)  # columns: from the last on stands a `Way`
_WAY = struct.Struct("<dqdd")


class Way(NamedTuple):
    """How a row is sampled, as in `RowParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p may take an id from the row."""
        return self.temperature != 0.0 and (self.top_k > 0 or self.top_p < 1.0)


def pack_row(
    seed: int, choice: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> bytes:
    """What `PlainRows` takes of a row, but for its position."""
    return _ROW.pack(seed, choice, temperature, top_k, top_p, min_p)


class PlainRows(Sequence[RowParams]):
    """Rows without bias, penalties and lists of ids. As a sequence it makes `RowParams`."""

    def __init__(self, packed: bytes, positions: np.ndarray | Sequence[int]) -> None:
        """packed: `pack_row` of R rows, one after another; positions: int64 [R]."""
        self.numbers = np.frombuffer(packed, "<i8").reshape(-1, FIELDS)
        """int64 [R, FIELDS]: the packed rows."""
        self.positions = np.asarray(positions, np.int64)
        if len(self.numbers) != len(self.positions):
            raise ValueError(f"{len(self.numbers)} rows have {len(self.positions)} positions")

    @classmethod
    def of(cls, params: Sequence[RowParams]) -> "PlainRows":
        """R > 0 params but for their bias, penalties and lists of ids."""
        temperatures, seeds, positions, choices, top_k, top_p, min_p, *_ = zip(*params, strict=True)
        packed = map(_ROW.pack, seeds, choices, temperatures, top_k, top_p, min_p)
        return cls(b"".join(packed), positions)

    @property
    def seed_words(self) -> np.ndarray:
        """uint32 [R, 2]: the low half of a seed, then the high one."""
        return self.numbers[:, _SEED : _SEED + 1].view("<u4")

    @property
    def choices(self) -> np.ndarray:
        """int64 [R]."""
        return self.numbers[:, _CHOICE]

    @property
    def temperatures(self) -> np.ndarray:
        """fp64 [R]."""
        return self.numbers[:, _TEMPERATURE].view(np.float64)

    def ways(self) -> tuple[list[Way], np.ndarray]:
        """Each way that any row is sampled, and which of them each row is: int64 [R]."""
        packed, size = self.numbers[:, _TEMPERATURE:].tobytes(), _WAY.size
        if packed == packed[:size] * len(self):
            return [Way(*_WAY.unpack(packed[:size]))], np.zeros(len(self), np.int64)
        # A dictionary takes a fraction of the time of `np.unique`.
        keys = [packed[at : at + size] for at in range(0, len(packed), size)]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        which = np.fromiter(map(places.__getitem__, keys), np.int64, len(keys))
        return [Way(*_WAY.unpack(key)) for key in places], which

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> RowParams: ...
    @overload
    def __getitem__(self, index: slice) -> "PlainRows": ...
    def __getitem__(self, index: int | slice) -> "RowParams | PlainRows":
        if isinstance(index, slice):
            return PlainRows(self.numbers[index].tobytes(), self.positions[index])
        seed, choice, temperature, *filters = _ROW.unpack(self.numbers[index].tobytes())
        return RowParams(temperature, seed, int(self.positions[index]), choice, *filters)
