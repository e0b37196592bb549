"""Tensors as bytes of a file, which any thread reads into memory that is there already.

No file of weights is mapped: whoever truncates a mapped file ends every process that reads it
(SIGBUS), and a trainer may write over a directory that it has told us to load. A read of a file
that has become shorter is an error with a name.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpdet.checkpoint.safetensors_header import SafetensorsEntry
from tpdet.errors import CheckpointError
from tpdet.launch.host.regular_file import open_regular

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_BLOCK_BYTES = 1 << 20
"""Rows of which only a part is wanted are read whole, so many bytes at a time."""


class StoredFile:
    """An open file; it is closed when nobody refers to it any more."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        with open_regular(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.name = path.name

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill all of `memory` from this byte of the file on; other threads run meanwhile.

        Raises OSError, and EOFError for a file that ends before.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not count:
                raise EOFError(f"the file ends at byte {offset + done}: download it again")
            done += count


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies in a file: row-major, its first byte at `entry.offset`.

    It has the form of a safetensors slice: `get_shape`, `get_dtype`, and parts by slices.
    """

    file: StoredFile
    name: str
    entry: SafetensorsEntry

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype. Raises CheckpointError for one that no model is stored in."""
        if self.entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name} has dtype {self.entry.dtype}: use "
                f"{', '.join(DTYPES)}"
            )
        return DTYPES[self.entry.dtype]

    def get_shape(self) -> list[int]:
        """Its extents."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Its dtype, as safetensors names it."""
        return self.entry.dtype

    def __getitem__(self, where: slice | tuple[slice, ...]) -> torch.Tensor:
        """A part of it, by slices of step 1, in memory of its own. Raises as `read_into`."""
        spans = self._spans(where)
        target = torch.empty([len(span) for span in spans], dtype=self.dtype)
        self._read_part(target, self.entry.shape, spans, 0)
        return target

    def read_part(self, target: torch.Tensor, where: slice | tuple[slice, ...]) -> None:
        """The same into `target`, which is contiguous, of this dtype and of the part's shape."""
        self._read_part(target, self.entry.shape, self._spans(where), 0)

    def _spans(self, where: slice | tuple[slice, ...]) -> list[range]:
        """What is asked for of each dimension."""
        shape = self.entry.shape
        parts = where if isinstance(where, tuple) else (where,)
        cuts = [*parts, *[slice(None)] * (len(shape) - len(parts))]
        return [range(*cut.indices(n)) for cut, n in zip(cuts, shape, strict=True)]

    def _read_part(
        self, target: torch.Tensor, shape: tuple[int, ...], spans: Sequence[range], begin: int
    ) -> None:
        """Fill `target` with the spans of what lies row-major in `shape` from byte `begin` on."""
        if not target.numel():
            return
        row_bytes = prod(shape[1:]) * self.dtype.itemsize
        if all(len(span) == extent for span, extent in zip(spans[1:], shape[1:], strict=True)):
            start = begin + (spans[0].start * row_bytes if spans else 0)
            self.read_into(_bytes_of(target), start)
        elif len(spans[0]) == 1 or row_bytes > _BLOCK_BYTES:
            for row, index in zip(target, spans[0], strict=True):
                self._read_part(row, shape[1:], spans[1:], begin + index * row_bytes)
        else:  # neighbouring rows whole, as a call of the system costs more than what is left out
            block = torch.empty((_BLOCK_BYTES // row_bytes, *shape[1:]), dtype=self.dtype)
            inner = tuple(slice(span.start, span.stop) for span in spans[1:])
            for rows, first in zip(target.split(len(block)), spans[0][:: len(block)], strict=True):
                whole = block[: len(rows)]
                self.read_into(_bytes_of(whole), begin + first * row_bytes)
                rows.copy_(whole[(slice(None), *inner)])

    def read_into(self, memory: memoryview, first: int) -> None:
        """Fill `memory` with its bytes from `first` on. Raises CheckpointError naming the file."""
        try:
            self.file.read_into(memory, self.entry.offset + first)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name} cannot be read: {error}"
            ) from error


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return values.view(-1).view(torch.uint8).numpy().data


class CheckpointTensor(NamedTuple):
    """A tensor that a model reads: its file, for messages, and what opens a view of it.

    The view has the form of a safetensors slice; nothing of it is read yet. stored: where its bytes
    lie, if its values are those; rule: how a quantised tensor becomes numbers, else ""; form: what
    says how its codes lie, equal where rows of two matrices can be joined, None without codes.
    """

    file: str
    open: Callable[[], Any]
    stored: StoredTensor | None = None
    rule: str = ""
    form: object = None

    def renamed(self, name: str) -> "CheckpointTensor":
        """The same tensor, which messages call by another name."""
        stored = None if self.stored is None else replace(self.stored, name=name)
        return self._replace(stored=stored)


Tensors = dict[str, CheckpointTensor]
"""Tensors by name."""
