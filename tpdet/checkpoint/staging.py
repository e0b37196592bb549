"""Moves tensors of the CPU to a GPU through pinned memory: several times as fast as without.

What is read from files for a CPU is filled in where it is used, as much at a time as a buffer has:
each byte is checked and digested while it is in the processor's cache.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import NamedTuple, Protocol

import torch

BUFFER_BYTES = 4 << 20
"""The size of a buffer. Each thread has two: one is filled while the other is copied to the GPU."""


class Copied(Protocol):
    """As much of a CUDA event as a buffer needs: whether its last copy is done."""

    def synchronize(self) -> None:
        """Wait until it is."""

    def record(self) -> None:
        """The copy was begun just now."""


class Chunk(NamedTuple):
    """Bytes for one buffer: `fill` writes the first `size` of it; those in `kept` go to `place`.

    place: memory of the device for as many bytes, of any dtype and shape.
    """

    size: int
    fill: Callable[[torch.Tensor], None]
    kept: slice
    place: torch.Tensor


Buffer = tuple[torch.Tensor, Copied]
"""uint8 [BUFFER_BYTES] of the CPU, and when it may be filled again."""


class Staging:
    """Buffers of pinned memory, for one device; each thread that moves tensors has its own."""

    def __init__(
        self, device: torch.device, make_buffer: Callable[[], Buffer] | None = None
    ) -> None:
        """make_buffer: what stands for a buffer of pinned memory; None for such a one."""
        self._device = device
        self._own = threading.local()
        self._make_buffer = make_buffer or (_pinned if device.type == "cuda" else _plain)
        self.used = device.type == "cuda" or make_buffer is not None
        """Whether `move` copies through buffers; on a CPU tensors are where they are used."""

    def move(self, part: torch.Tensor) -> torch.Tensor:
        """A copy on the device, which all work that this thread launches from now on may read.

        The same tensor if it is there already.
        """
        if part.device.type != "cpu" or not self.used:
            return part.to(self._device)
        moved = self.empty(part.shape, part.dtype)
        source = part.contiguous().view(-1).view(torch.uint8)
        target = moved.view(-1).view(torch.uint8)
        pieces = zip(source.split(BUFFER_BYTES), target.split(BUFFER_BYTES), strict=True)
        self.send(
            Chunk(piece.nbytes, partial(_fill, piece), slice(None), place)
            for piece, place in pieces
        )
        return moved

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device, to send to."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def send(self, chunks: Iterable[Chunk]) -> None:
        """Fill buffers and copy each to its place; the copies are done as `move`'s are."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._send(chunks)
        else:
            self._send(chunks)

    def _send(self, chunks: Iterable[Chunk]) -> None:
        for (size, fill, kept, place), (buffer, copied) in zip(
            chunks, cycle(self._buffers()), strict=False
        ):
            # A reload reads on the CPU what goes over the weights of a GPU.
            here = not self.used and place.device.type == "cpu"
            if here and place.is_contiguous() and place.nbytes == size:
                fill(place.view(-1).view(torch.uint8))
                continue
            copied.synchronize()
            staged = buffer[:size]
            fill(staged)
            values = staged[kept].view(place.dtype).view(place.shape)
            place.copy_(values, non_blocking=True)
            copied.record()

    def _buffers(self) -> list[Buffer]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = [self._make_buffer() for _ in range(2)]
        buffers: list[Buffer] = self._own.buffers
        return buffers


def _fill(piece: torch.Tensor, staged: torch.Tensor) -> None:
    staged.copy_(piece)


def _pinned() -> Buffer:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


class _Done:
    """A copy of a CPU: it is done when it returns."""

    def synchronize(self) -> None:
        """Return at once."""

    record = synchronize


def _plain() -> Buffer:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8), _Done()
