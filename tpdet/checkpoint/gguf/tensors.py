"""The tensors of a GGUF file, dequantised row by row as they are read.

Rule: w = dequantise(stored), in fp32, as the `gguf` package computes it for the tensor's type. It
is then rounded once to the model's dtype. F32, F16 and BF16 are taken as they are stored.
"""

from functools import partial

import numpy as np
import torch

from tpdet.checkpoint.gguf.header import GgufHeader, TensorEntry
from tpdet.checkpoint.gguf.names import NamedTensor, named_tensors
from tpdet.checkpoint.stored import CheckpointTensor, StoredFile, Tensors
from tpdet.errors import CheckpointError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_Where = slice | tuple[slice, ...]


def gguf_tensors(header: GgufHeader) -> Tensors:
    """The tensors of a file by Hugging Face's names; raises as `named_tensors`, and
    CheckpointError for a file that cannot be opened.
    """
    try:
        data = StoredFile(header.path)
    except OSError as error:
        raise CheckpointError(f"{header.path.name} cannot be read: {error}") from error
    file, tensors = header.path.name, {}
    for name, tensor in named_tensors(header).items():
        kind = tensor.entry.kind
        rule = "" if kind in _PLAIN else f"gguf {kind}"
        tensors[name] = CheckpointTensor(file, partial(GgufTensor, data, tensor, file), rule=rule)
    return tensors


class GgufTensor:
    """One tensor, in the form of a safetensors slice."""

    def __init__(self, data: StoredFile, tensor: NamedTensor, file: str) -> None:
        self._data, self._entry, self._tensor = data, tensor.entry, tensor
        self._file = file

    def get_shape(self) -> list[int]:
        """Its extents, rows first."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The dtype of what is read: quantised values, and changed ones, become fp32."""
        plain = self._entry.kind in _PLAIN and self._tensor.undo is None
        return self._entry.kind if plain else "F32"

    def __getitem__(self, where: _Where) -> torch.Tensor:
        """A part of it by slices of step 1.

        Raises CheckpointError for an unknown type, and for a file that has become shorter.
        """
        tensor = self._tensor
        parts = where if isinstance(where, tuple) else (where,)
        parts = (*parts, *[slice(None)] * (len(tensor.shape) - len(parts)))
        *leading, columns = (
            range(*part.indices(extent)) for part, extent in zip(parts, tensor.shape, strict=True)
        )
        sizes = [len(span) for span in (*leading, columns)]
        if 0 in sizes:  # a piece without values, which nothing can view
            return torch.empty(sizes, dtype=_PLAIN[self.get_dtype()])
        rows = np.zeros(1, np.int64)
        for span, extent in zip(leading, tensor.shape[:-1], strict=True):
            rows = (rows[:, None] * extent + np.arange(span.start, span.stop)).reshape(-1)
        if tensor.rows is not None:
            rows = tensor.rows[rows]
        runs = [columns]
        if tensor.columns is not None:
            runs = _runs(tensor.columns[columns.start : columns.stop])
        stored = self._rows(rows)
        parts_of_rows = [self._values(stored, run) for run in runs]
        values = parts_of_rows[0] if len(runs) == 1 else torch.cat(parts_of_rows, 1)
        if tensor.undo is not None:
            values = tensor.undo(values)
        return values.reshape(sizes)

    def _values(self, stored: np.ndarray, columns: range) -> torch.Tensor:
        """Columns that follow each other, of rows as they are stored."""
        entry = self._entry
        block, width = entry.block, entry.row_bytes * entry.block // entry.shape[-1]
        begin, end = columns.start // block, -(-columns.stop // block)
        cut = np.ascontiguousarray(stored[:, begin * width : end * width])
        values = _dequantise(cut, entry, self._file)
        return values[:, columns.start - begin * block : columns.stop - begin * block]

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of some rows [rows, bytes of a row], of all from the first to the last."""
        entry, low, high = self._entry, int(rows.min()), int(rows.max())
        stored = np.empty((high + 1 - low, entry.row_bytes), np.uint8)
        try:
            self._data.read_into(stored.data.cast("B"), entry.offset + low * entry.row_bytes)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self._file}: tensor {entry.name} cannot be read: {error}"
            ) from error
        in_order = len(rows) == len(stored) and self._tensor.rows is None
        return stored if in_order else stored[rows - low]


def _runs(order: np.ndarray) -> list[range]:
    """Stretches of numbers that follow each other."""
    parts = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts]


def _dequantise(stored: np.ndarray, entry: TensorEntry, file: str) -> torch.Tensor:
    """Bytes [rows, bytes] -> values [rows, columns]."""
    if entry.kind in _PLAIN:
        return torch.from_numpy(stored).view(_PLAIN[entry.kind])
    from gguf import GGMLQuantizationType, dequantize

    try:
        with np.errstate(all="ignore"):  # infinite scales are refused by name afterwards
            values = dequantize(stored, GGMLQuantizationType[entry.kind])
    except NotImplementedError:
        raise CheckpointError(
            f"{file}: tensor {entry.name} has type {entry.kind}, which cannot be dequantised: use "
            "another quantisation"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
