"""Moves tensors of the CPU to a GPU through pinned memory: several times as fast as without."""

import threading
from itertools import cycle

import torch

_BYTES = 4 << 20
"""Of a buffer. Each thread has two: one is filled while the other is copied to the GPU."""


class Staging:
    """Buffers of pinned memory, for one device; each thread that moves tensors has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def move(self, part: torch.Tensor) -> torch.Tensor:
        """A copy on the device, which all work that this thread launches from now on may read.

        The same tensor if it is there already.
        """
        if part.device.type == self._device.type or self._device.type != "cuda":
            return part.to(self._device)
        with torch.cuda.device(self._device):
            moved = torch.empty(part.shape, dtype=part.dtype, device=self._device)
            self._copy(part.contiguous().view(-1), moved.view(-1))
        return moved

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        at_a_time = _BYTES // source.element_size()
        pieces = zip(source.split(at_a_time), target.split(at_a_time), strict=True)
        for (piece, place), (buffer, copied) in zip(pieces, cycle(self._buffers()), strict=False):
            copied.synchronize()
            staged = buffer[: piece.nbytes].view(piece.dtype)
            staged.copy_(piece)
            place.copy_(staged, non_blocking=True)
            copied.record()

    def _buffers(self) -> list[tuple[torch.Tensor, torch.cuda.Event]]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = [
                (torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        found: list[tuple[torch.Tensor, torch.cuda.Event]] = self._own.buffers
        return found
