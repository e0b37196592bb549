"""Pieces of a stored tensor, checked and digested in the buffers that copy them to the device.

No byte is touched twice outside a processor's cache: each lands in a buffer, where its values are
checked, digested, and copied to the device from. A thread holds Python's lock a few times a buffer
only; with many threads, that is what a load waits for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import blake3
import torch

from tpdet.checkpoint.finite import bits_finite
from tpdet.checkpoint.staging import BUFFER_BYTES, Chunk, Staging
from tpdet.checkpoint.stored import StoredTensor
from tpdet.errors import CheckpointError


@dataclass(frozen=True)
class StreamedPiece:
    """Elements [first, last) along `dim` of a tensor, of which those in `kept` are copied.

    kept: counted from `first`; None for all. apart: reads the piece, where its rows lie apart.
    """

    tensor: StoredTensor
    apart: Callable[[], AbstractContextManager[torch.Tensor]]
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

    def send(
        self, staging: Staging, header: bytes, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bytes]:
        """The piece on the device, and the BLAKE3 of `header` and its bytes, row-major.

        target: memory of the device that it goes to if it can, which is returned then.

        Raises CheckpointError naming the file for NaN, infinity and a file that cannot be read.
        """
        digest = blake3.blake3(header)
        kept = range(self.last - self.first) if self.kept is None else self.kept
        shape = self.tensor.entry.shape
        held = (*shape[: self.dim], len(kept), *shape[self.dim + 1 :])
        moved = target
        if target is None or not self._goes_to(target, held):
            moved = staging.empty(held, self.tensor.dtype)
        assert moved is not None
        staging.send(
            self._adjacent_chunks(moved.view(-1).view(torch.uint8), kept, digest)
            if self._adjacent
            else self._row_chunks(moved.view(held), digest)
        )
        return moved, digest.digest()

    def _goes_to(self, target: torch.Tensor, held: tuple[int, ...]) -> bool:
        """Whether buffers are copied to memory as it is; a GPU takes whole stretches alone."""
        if target.dtype != self.tensor.dtype:
            return False
        rows_apart = target.device.type == "cpu" and not self._adjacent and target.shape == held
        return target.is_contiguous() or rows_apart

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
        """Copy from memory; in the file each row of the piece is apart from the next."""
        rows = BUFFER_BYTES // self._row_bytes
        with self.apart() as part:
            for at in range(0, len(part), rows):
                some = part[at : at + rows]

                def fill(staged: torch.Tensor, some: torch.Tensor = some) -> None:
                    staged.view(some.dtype).view(some.shape).copy_(some)
                    self._check(staged, digest)

                yield Chunk(some.nbytes, fill, slice(None), target[at : at + rows])

    def _check(self, staged: torch.Tensor, digest: blake3.blake3) -> None:
        raw = staged.numpy()
        if not bits_finite(raw, self.tensor.dtype):
            raise CheckpointError(
                f"{self.tensor.file.name}: tensor {self.tensor.name} holds NaN or infinity"
            )
        digest.update(raw.data)
