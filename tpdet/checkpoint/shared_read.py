"""Parts of a tensor whose bytes lie apart in its file: read once for all threads that want some.

Columns of a row-major tensor lie apart, so whoever reads some of them passes over the others. Here
each row is read once, by whichever of the threads comes first, and all of them take their columns.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from tpdet.checkpoint.stored import StoredTensor

_CHUNK_BYTES = 4 << 20


class SharedReads:
    """The tensors of which some parts were asked for, and memory to use again."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, tuple[tuple[int, int], ...]], SharedRead] = {}
        self._spare: list[torch.Tensor] = []
        self._turn = threading.Lock()

    @contextmanager
    def part(
        self,
        name: str,
        view: Any,
        dtype: torch.dtype,
        dim: int,
        bounds: Sequence[tuple[int, int]],
        span: tuple[int, int],
    ) -> Iterator[torch.Tensor]:
        """Elements of `span` along `dim` of a tensor, in memory that is others' behind the block.

        view: the tensor, in the form of a safetensors slice; bounds: of all parts, `span` among
        them, each of which is asked for once. Raises what a read raised, in whichever thread.
        """
        key = name, tuple(bounds)
        with self._turn:
            read = self._begun.get(key)
            if read is None:
                whole = bounds[0][0], bounds[-1][1]
                read = SharedRead(view, dtype, dim, whole, len(bounds), self._memory)
                self._begun[key] = read
            read.users += 1
        try:
            yield read.part(*span)
        finally:
            with self._turn:
                read.users, read.parts = read.users - 1, read.parts - 1
                if not read.parts:
                    del self._begun[key]
                if read.parts <= 0 and not read.users and read.memory is not None:
                    self._spare.append(read.memory)

    def _memory(self, size: int) -> torch.Tensor:
        """At least so many bytes."""
        with self._turn:
            for number, memory in enumerate(self._spare):
                if memory.numel() >= size:
                    return self._spare.pop(number)
            self._spare.clear()  # all too small
        return torch.empty(size, dtype=torch.uint8)


class SharedRead:
    """Elements of a `span` along `dim` of a tensor, in memory once a thread asks for a part.

    parts: how many were not used yet; users: threads that use one; memory: their bytes, and more.
    """

    users = 0
    memory: torch.Tensor | None = None

    def __init__(
        self,
        view: Any,
        dtype: torch.dtype,
        dim: int,
        span: tuple[int, int],
        parts: int,
        memory_of: Callable[[int], torch.Tensor],
    ) -> None:
        """view: as in `SharedReads.part`; memory_of: memory of so many bytes."""
        self._view, self._dtype, self._dim, self._first = view, dtype, dim, span[0]
        self._shape = [*view.get_shape()]
        self._shape[dim] = span[1] - span[0]
        self._memory_of, self.parts = memory_of, parts
        self._turn = threading.Condition()
        self._values = torch.empty(0)
        self._chunks: Iterator[range] = iter(())
        self._unread = 0
        self._error: BaseException | None = None

    def part(self, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the tensor along `dim`; reads, or waits for who reads."""
        with self._turn:
            if self.memory is None:
                self._begin()
        while True:
            with self._turn:
                rows = next(self._chunks, None)
            if rows is None:
                break
            self._read(rows)
        with self._turn:
            self._turn.wait_for(lambda: self._error is not None or not self._unread)
            if self._error is not None:
                raise self._error
        return self._values.narrow(self._dim, first - self._first, last - first)

    def _begin(self) -> None:
        """Get memory, whose rows are to be read in chunks."""
        size = prod(self._shape) * self._dtype.itemsize
        self.memory = self._memory_of(size)
        self._values = self.memory[:size].view(self._dtype).view(self._shape)
        rows = self._shape[0]
        step = max(1, _CHUNK_BYTES * rows // max(1, size))
        chunks = [range(row, min(row + step, rows)) for row in range(0, rows, step)]
        self._chunks, self._unread = iter(chunks), len(chunks)

    def _read(self, rows: range) -> None:
        where = [slice(0, extent) for extent in self._shape]
        where[self._dim] = slice(self._first, self._first + self._shape[self._dim])
        begin = where[0].start
        where[0] = slice(begin + rows.start, begin + rows.stop)
        error, target = None, self._values[rows.start : rows.stop]
        try:
            if isinstance(self._view, StoredTensor):
                self._view.read_part(target, tuple(where))
            else:
                target.copy_(self._view[tuple(where)])
        except BaseException as raised:
            error = raised
        with self._turn:
            self._unread -= 1
            self._error = self._error or error
            self._turn.notify_all()
