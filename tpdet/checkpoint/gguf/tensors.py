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
        self._data, self._entry, self._heads = data, tensor.entry, tensor.heads
        self._file = file

    def get_shape(self) -> list[int]:
        """Its extents, rows first."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype of what is read: quantised values become fp32."""
        return self._entry.kind if self._entry.kind in _PLAIN else "F32"

    def __getitem__(self, where: _Where) -> torch.Tensor:
        """Rows and columns by slices of step 1.

        Raises CheckpointError for an unknown type, and for a file that has become shorter.
        """
        entry = self._entry
        parts = where if isinstance(where, tuple) else (where,)
        parts = (*parts, *[slice(None)] * (len(entry.shape) - len(parts)))
        rows = np.arange(entry.size // entry.row_bytes)
        if self._heads:
            rows = _stored_rows(len(rows), self._heads)[parts[0]]
        elif len(entry.shape) > 1:
            rows = rows[parts[0]]
        first, last, _ = parts[-1].indices(entry.shape[-1])
        block, width = entry.block, entry.row_bytes * entry.block // entry.shape[-1]
        begin, end = first // block, -(-last // block)
        if not len(rows) or first >= last:  # a piece without values, which nothing can view
            return self._empty(len(rows), max(0, last - first))
        cut = np.ascontiguousarray(self._rows(rows)[:, begin * width : end * width])
        values = _dequantise(cut, entry, self._file)
        values = values[:, first - begin * block : last - begin * block]
        return values.reshape(-1) if len(entry.shape) == 1 else values

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
        return stored if len(rows) == len(stored) and not self._heads else stored[rows - low]

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        """A cut without values."""
        shape = (columns,) if len(self._entry.shape) == 1 else (rows, columns)
        return torch.empty(shape, dtype=_PLAIN.get(self._entry.kind, torch.float32))


def _stored_rows(rows: int, heads: int) -> np.ndarray:
    """Which row of the file is each row of the tensor: heads of pairs back to heads of halves."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


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
