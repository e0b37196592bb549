"""Pieces of a stored tensor, checked and digested in the buffers that copy them to the device.

No byte is touched twice outside a processor's cache: each lands in a buffer, where its values are
checked, digested, and copied to the device from. A thread holds Python's lock a few times a buffer
only; with many threads, that is what a load waits for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import blake3
import torch

from tpdet.checkpoint.finite import bits_finite
from tpdet.checkpoint.staging import BUFFER_BYTES, Chunk, Staging
from tpdet.checkpoint.stored import StoredTensor
from tpdet.errors import CheckpointError


@dataclass(frozen=True)
class StreamedPiece:
    """Elements [first, last) along `dim` of a tensor, of which those in `kept` are copied.

    kept: counted from `first`; None for all. view: gives the tensor as a safetensors slice.
    """

    tensor: StoredTensor
    view: Callable[[], Any]
    dim: int
    first: int
    last: int
    kept: range | None

    @property
    def fits(self) -> bool:
        """Whether it can be streamed: bytes that follow each other, or short rows kept whole."""
        if self._adjacent:
            return True
        return self.kept is None and 0 < self._row_bytes <= BUFFER_BYTES

    def send(self, staging: Staging, header: bytes) -> tuple[torch.Tensor, bytes]:
        """The piece on the device, and the BLAKE3 of `header` and its bytes, row-major.

        Raises CheckpointError naming the file for NaN, infinity and a file that cannot be read.
        """
        digest = blake3.blake3(header)
        kept = range(self.last - self.first) if self.kept is None else self.kept
        shape = self.tensor.entry.shape
        held = (*shape[: self.dim], len(kept), *shape[self.dim + 1 :])
        moved = staging.empty(held, self.tensor.dtype)
        target = moved.view(-1).view(torch.uint8)
        staging.send(
            self._adjacent_chunks(target, kept, digest)
            if self._adjacent
            else self._row_chunks(target, digest)
        )
        return moved, digest.digest()

    @property
    def _adjacent(self) -> bool:
        return prod(self.tensor.entry.shape[: self.dim]) == 1

    @property
    def _row_bytes(self) -> int:
        """The bytes of one index of the piece's first dimension."""
        shape = self.tensor.entry.shape
        extents = [self.last - self.first if i == self.dim else n for i, n in enumerate(shape)]
        return prod(extents[1:]) * self.tensor.dtype.itemsize

    def _adjacent_chunks(
        self, target: torch.Tensor, kept: range, digest: blake3.blake3
    ) -> Iterator[Chunk]:
        """Read straight from the file; the piece's bytes follow each other there."""
        each = prod(self.tensor.entry.shape[self.dim + 1 :]) * self.tensor.dtype.itemsize
        begin, end = self.first * each, self.last * each
        keep_from, keep_to = (begin + index * each for index in (kept.start, kept.stop))
        for at in range(begin, end, BUFFER_BYTES):
            after = min(at + BUFFER_BYTES, end)
            first, last = (min(max(edge, at), after) for edge in (keep_from, keep_to))

            def fill(staged: torch.Tensor, at: int = at) -> None:
                raw = staged.numpy()
                self.tensor.read_into(raw.data, at)
                self._check(staged, digest)

            place = target[max(0, first - keep_from) : max(0, last - keep_from)]
            yield Chunk(after - at, fill, slice(first - at, last - at), place)

    def _row_chunks(self, target: torch.Tensor, digest: blake3.blake3) -> Iterator[Chunk]:
        """Read from the mapped file; each row of the piece is apart from the next."""
        whole = (slice(None) for _ in range(self.dim))
        part = self.view()[(*whole, slice(self.first, self.last))]
        rows = BUFFER_BYTES // self._row_bytes
        for at in range(0, len(part), rows):
            some = part[at : at + rows]

            def fill(staged: torch.Tensor, some: torch.Tensor = some) -> None:
                staged.view(some.dtype).view(some.shape).copy_(some)
                self._check(staged, digest)

            begin = at * self._row_bytes
            yield Chunk(some.nbytes, fill, slice(None), target[begin : begin + some.nbytes])

    def _check(self, staged: torch.Tensor, digest: blake3.blake3) -> None:
        raw = staged.numpy()
        if not bits_finite(raw, self.tensor.dtype):
            raise CheckpointError(
                f"{self.tensor.file.name}: tensor {self.tensor.name} holds NaN or infinity"
            )
        digest.update(raw.data)
