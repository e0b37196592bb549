"""The tensors of a GGUF file, dequantised row by row as they are read.

Rule: w = dequantise(stored), in fp32, as the `gguf` package computes it for the tensor's type. It
is then rounded once to the model's dtype. F32, F16 and BF16 are taken as they are stored.
"""

from functools import partial

import numpy as np
import torch

from tpdet.checkpoint.gguf.header import GgufHeader, TensorEntry
from tpdet.checkpoint.gguf.names import NamedTensor, named_tensors
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError, ResourceError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_Where = slice | tuple[slice, ...]


def gguf_tensors(header: GgufHeader) -> Tensors:
    """The tensors of a file, which is memory-mapped, by Hugging Face's names.

    Raises as `named_tensors`, and ResourceError where the file cannot be mapped.
    """
    try:
        data = np.memmap(header.path, mode="r", dtype=np.uint8)
    except OSError as error:
        raise ResourceError(
            f"{header.path} cannot be mapped ({error.strerror}): raise the limit of memory"
        ) from None
    file, tensors = header.path.name, {}
    for name, tensor in named_tensors(header).items():
        kind = tensor.entry.kind
        rule = "" if kind in _PLAIN else f"gguf {kind}"
        tensors[name] = CheckpointTensor(file, partial(GgufTensor, data, tensor, file), rule=rule)
    return tensors


class GgufTensor:
    """One tensor, in the form of a safetensors slice."""

    def __init__(self, data: np.ndarray, tensor: NamedTensor, file: str) -> None:
        self._data, self._entry, self._heads = data, tensor.entry, tensor.heads
        self._file = file

    def get_shape(self) -> list[int]:
        """Its extents, rows first."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype of what is read: quantised values become fp32."""
        return self._entry.kind if self._entry.kind in _PLAIN else "F32"

    def __getitem__(self, where: _Where) -> torch.Tensor:
        """Rows and columns by slices of step 1. Raises CheckpointError for an unknown type."""
        entry = self._entry
        parts = where if isinstance(where, tuple) else (where,)
        parts = (*parts, *[slice(None)] * (len(entry.shape) - len(parts)))
        stored = _rows(self._data, entry)
        if self._heads:
            stored = stored[_stored_rows(entry.shape[0], self._heads)[parts[0]]]
        elif len(entry.shape) > 1:
            stored = stored[parts[0]]
        first, last, _ = parts[-1].indices(entry.shape[-1])
        block, width = entry.block, entry.row_bytes * entry.block // entry.shape[-1]
        begin, end = first // block, -(-last // block)
        if not len(stored) or first >= last:  # a piece without values, which nothing can view
            return self._empty(len(stored), max(0, last - first))
        cut = np.array(stored[:, begin * width : end * width])
        values = _dequantise(cut, entry, self._file)
        values = values[:, first - begin * block : last - begin * block]
        return values.reshape(-1) if len(entry.shape) == 1 else values

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        """A cut without values."""
        shape = (columns,) if len(self._entry.shape) == 1 else (rows, columns)
        return torch.empty(shape, dtype=_PLAIN.get(self._entry.kind, torch.float32))


def _rows(data: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """The bytes of a tensor [rows, bytes of a row], not read yet; a vector is one row."""
    stored = data[entry.offset : entry.offset + entry.size]
    return stored.reshape(-1, entry.row_bytes)


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
