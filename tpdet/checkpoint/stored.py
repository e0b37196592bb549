"""Tensors as bytes of a file, which any thread reads into memory that is there already."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpdet.checkpoint.safetensors_header import SafetensorsEntry
from tpdet.errors import CheckpointError
from tpdet.launch.host.regular_file import open_regular


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


class StoredTensor(NamedTuple):
    """One tensor as it lies in a file: row-major, its first byte at `entry.offset`."""

    file: StoredFile
    name: str
    entry: SafetensorsEntry
    dtype: torch.dtype

    def read_into(self, memory: memoryview, first: int) -> None:
        """Fill `memory` with its bytes from `first` on. Raises CheckpointError naming the file."""
        try:
            self.file.read_into(memory, self.entry.offset + first)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name} cannot be read: {error}"
            ) from error


class CheckpointTensor(NamedTuple):
    """A tensor that a model reads: its file, for messages, and what opens a view of it.

    The view has the form of a safetensors slice; nothing of it is read yet. stored: where its bytes
    lie, if its values are those; rule: how a quantised tensor becomes numbers, else "".
    """

    file: str
    open: Callable[[], Any]
    stored: StoredTensor | None = None
    rule: str = ""

    def renamed(self, name: str) -> "CheckpointTensor":
        """The same tensor, which messages call by another name."""
        stored = None if self.stored is None else self.stored._replace(name=name)
        return self._replace(stored=stored)


Tensors = dict[str, CheckpointTensor]
"""Tensors by name."""
