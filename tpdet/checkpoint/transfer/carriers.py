"""What brings the bytes of announced tensors to a rank: its form, and the cutting into chunks."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Protocol, TypeVar

import torch

from tpdet.checkpoint.transfer.announced import AnnouncedTensor
from tpdet.control.weight_orders import CarrierInfo, TensorsInfo
from tpdet.errors import WeightUpdateError

TICK_SECONDS = 0.05
"""A rank that waits for a sender looks up so often; what comes meanwhile ends the wait at once."""

Take = Callable[[dict[str, torch.Tensor]], None]
"""Takes tensors that arrived; their memory is used again when it returns."""
Tick = Callable[[], None]
_Result = TypeVar("_Result")


class WeightCarrier(Protocol):
    """One rank's connection to a sender. After an error it is closed, for good."""

    def receive(
        self, tensors: Sequence[AnnouncedTensor], info: TensorsInfo, take: Take, tick: Tick
    ) -> None:
        """Hand over each tensor, in order; returns when all are here.

        Raises WeightUpdateError (502) when the sender is gone or silent for too long.
        """

    def close(self) -> None:
        """Let go of the sender; harmless a second time."""


class BroadcastCarrier:
    """A sender that broadcasts tensors, one by one or joined; `_broadcast` fills a tensor."""

    def __init__(self, info: CarrierInfo, device: torch.device) -> None:
        self._info, self._device = info, device

    def receive(
        self, tensors: Sequence[AnnouncedTensor], info: TensorsInfo, take: Take, tick: Tick
    ) -> None:
        """As `WeightCarrier.receive`; the extra memory is one chunk's, or one tensor's."""
        packed = self._info.packed if info.packed is None else info.packed
        if not packed:
            for tensor in tensors:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                self._broadcast(values, tick)
                take({tensor.name: values})
                del values
            return
        size = info.packed_buffer_size_bytes or self._info.packed_buffer_size_bytes
        for chunk in chunks_of(tensors, size):
            total = sum(tensor.size for tensor in chunk)
            joined = torch.empty(total, dtype=torch.uint8, device=self._device)
            self._broadcast(joined, tick)
            take(cut_chunk(joined, chunk))
            del joined

    def _broadcast(self, values: torch.Tensor, tick: Tick) -> None:
        """Fill `values` with the sender's. Raises WeightUpdateError."""
        raise NotImplementedError


def chunks_of(tensors: Sequence[AnnouncedTensor], size: int) -> Iterator[list[AnnouncedTensor]]:
    """Neighbours that a sender joins: it adds tensors until they have more than `size` bytes.

    vLLM's rule, which both sides follow without a word on the wire.
    """
    chunk: list[AnnouncedTensor] = []
    total = 0
    for tensor in tensors:
        chunk.append(tensor)
        total += tensor.size
        if total > size:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def cut_chunk(joined: torch.Tensor, chunk: Sequence[AnnouncedTensor]) -> dict[str, torch.Tensor]:
    """The tensors whose bytes follow each other in `joined` (uint8); copied where unaligned."""
    tensors = {}
    parts = joined.split([tensor.size for tensor in chunk])
    for tensor, part in zip(chunk, parts, strict=True):
        aligned = part.storage_offset() % tensor.dtype.itemsize == 0
        whole = part if aligned else part.clone()
        tensors[tensor.name] = whole.view(tensor.dtype).view(tensor.shape)
    return tensors


def wait_ticking(work: Callable[[], _Result], tick: Tick, what: str, seconds: float) -> _Result:
    """The result of `work`, which blocks, in a thread; `tick` is called while it does.

    Raises WeightUpdateError naming `what` (502) for an error and after this many seconds; the
    thread is then left behind, to end by itself.
    """
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="weights-sender", daemon=True).start()
    deadline = time.monotonic() + seconds
    tick()
    while not wait([result], TICK_SECONDS).done:
        if time.monotonic() > deadline:
            raise WeightUpdateError(f"{what}: nothing came in {seconds:g} s", 502)
        tick()
    error = result.exception()
    if error is not None:
        raise WeightUpdateError(f"{what}: {str(error) or type(error).__name__}", 502) from error
    return result.result()
