"""Sampling parameters of many rows by columns: an object a row would take the host too long."""

import struct
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from tpdet.kernels.inputs.row_params import PlainParams, RowParams

_CODES = "".join({float: "d", int: "q"}[kind] for kind in PlainParams.__annotations__.values())
_ROW, _PARAMS = struct.Struct(f"<Qq{_CODES}"), struct.Struct(f"<{_CODES}")
FIELDS = _ROW.size // 8
"""int64 values of `pack_row`."""
WORDS = 13
"""int64 values of a row that is written once and sampled again and again, each time one position
further (`ops.write_rows`). What they mean is its device's own."""
_PACKED_FIELDS = ("seed", "choice", *PlainParams._fields)
_SEED, _CHOICE, _TEMPERATURE = range(3)  # columns: from the last on stand `PlainParams`


def pack_row(seed: int, choice: int, *params: float) -> bytes:
    """What `PlainRows` takes of a row, but for its position; params: those of `PlainParams`."""
    return _ROW.pack(seed, choice, *params)


class PlainRows(Sequence[RowParams]):
    """Rows without bias, penalties and lists of ids. As a sequence it makes `RowParams`."""

    def __init__(
        self, packed: bytes, positions: np.ndarray | Sequence[int], moved: Any = None
    ) -> None:
        """packed: `pack_row` of R rows, one after another; positions: int64 [R].

        moved: what the device adds to the positions, int64 [R] on it; None: nothing.
        """
        self.numbers = np.frombuffer(packed, "<i8").reshape(-1, FIELDS)
        """int64 [R, FIELDS]: the packed rows."""
        self.positions, self.moved = np.asarray(positions, np.int64), moved
        if len(self.numbers) != len(self.positions):
            raise ValueError(f"{len(self.numbers)} rows have {len(self.positions)} positions")

    @classmethod
    def of(cls, params: Sequence[RowParams]) -> "PlainRows":
        """R > 0 params but for their bias, penalties and lists of ids."""
        columns = dict(zip(RowParams._fields, zip(*params, strict=True), strict=True))
        packed = map(_ROW.pack, *(columns[name] for name in _PACKED_FIELDS))
        return cls(b"".join(packed), columns["position"])

    def moved_by(self, moved: Any) -> "PlainRows":
        """The rows at other positions; moved: as at first."""
        return PlainRows(self.numbers.tobytes(), self.positions, moved)

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

    def ways(self) -> tuple[list[PlainParams], np.ndarray]:
        """Each way that any row is sampled, and which of them each row is: int64 [R]."""
        packed, size = self.numbers[:, _TEMPERATURE:].tobytes(), _PARAMS.size
        if packed == packed[:size] * len(self):
            return [PlainParams(*_PARAMS.unpack(packed[:size]))], np.zeros(len(self), np.int64)
        # A dictionary takes a fraction of the time of `np.unique`.
        keys = [packed[at : at + size] for at in range(0, len(packed), size)]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        which = np.fromiter(map(places.__getitem__, keys), np.int64, len(keys))
        return [PlainParams(*_PARAMS.unpack(key)) for key in places], which

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> RowParams: ...
    @overload
    def __getitem__(self, index: slice) -> "PlainRows": ...
    def __getitem__(self, index: int | slice) -> "RowParams | PlainRows":
        if isinstance(index, slice):
            moved = None if self.moved is None else self.moved[index]
            return PlainRows(self.numbers[index].tobytes(), self.positions[index], moved)
        seed, choice, temperature, *others = _ROW.unpack(self.numbers[index].tobytes())
        position = int(self.positions[index])
        position += 0 if self.moved is None else int(self.moved[index])
        return RowParams(temperature, seed, position, choice, *others)
