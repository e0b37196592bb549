"""Tensors broadcast by NCCL from a trainer's GPU, as vLLM's clients send them.

The library is called as it is: a group of torch's would appear in its global list, and could not
be given up while a sender is silent.
"""

import ctypes
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from tpdet.checkpoint.transfer.carriers import TICK_SECONDS, BroadcastCarrier, Tick, wait_ticking
from tpdet.checkpoint.transfer.rendezvous import UNIQUE_ID_BYTES, unique_id_of
from tpdet.control.weight_orders import CarrierInfo
from tpdet.errors import WeightUpdateError

_LIBRARY = "libnccl.so.2"
NCCL_DTYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM, _SENDER = 0, 0


class UniqueId(ctypes.Structure):
    """What ranks of one group have in common, as the library takes it by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


@cache
def nccl_library() -> ctypes.CDLL:
    """The library that torch has. Raises WeightUpdateError (400) where there is none."""
    package = find_spec("nvidia.nccl") if find_spec("nvidia") is not None else None
    folders = [] if package is None else [*(package.submodule_search_locations or [])]
    paths = [Path(folder) / "lib" / _LIBRARY for folder in folders]
    try:
        library = ctypes.CDLL(str(next((path for path in paths if path.exists()), _LIBRARY)))
    except OSError as error:
        raise WeightUpdateError(
            f"{_LIBRARY} cannot be loaded ({error}): use backend gloo or a directory"
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int,
    ]  # fmt: skip
    library.ncclBroadcast.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclAllReduce.argtypes = library.ncclBroadcast.argtypes
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return library


class NcclCarrier(BroadcastCarrier):
    """One rank's communicator with a sender; it is aborted when the sender is silent."""

    def __init__(
        self, info: CarrierInfo, rank: int, device: torch.device, timeout: float, tick: Tick
    ) -> None:
        """Join the sender's group and take part in its first all-reduce.

        Raises WeightUpdateError: 400 for what cannot be, 502 where the sender is not met.
        """
        super().__init__(info, device)
        self._timeout = timeout
        self._communicator = ctypes.c_void_p()
        own = info.rank_offset + rank
        what = f"NCCL group of {info.world_size}"
        library, communicator = nccl_library(), self._communicator

        def join() -> None:
            unique = UniqueId.from_buffer_copy(unique_id_of(info, own, timeout))
            with torch.cuda.device(device):
                pointer = ctypes.byref(communicator)
                _check(library.ncclCommInitRank(pointer, info.world_size, unique, own))

        wait_ticking(join, tick, what, timeout)
        self._stream = torch.cuda.Stream(device)
        first = torch.zeros(1, device=device)
        self._run(first, tick, all_reduce=True)

    def _broadcast(self, values: torch.Tensor, tick: Tick) -> None:
        self._run(values, tick)

    def _run(self, values: torch.Tensor, tick: Tick, all_reduce: bool = False) -> None:
        """Broadcast into `values`, or add them up; returns when they are there."""
        if not self._communicator:
            raise WeightUpdateError("the sender's group is closed: init it again", 409)
        library, pointer = nccl_library(), values.data_ptr()
        operation = library.ncclAllReduce if all_reduce else library.ncclBroadcast
        which = _SUM if all_reduce else _SENDER
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device):
            what = pointer, pointer, values.numel(), NCCL_DTYPES[values.dtype], which
            _check(operation(*what, self._communicator, self._stream.cuda_stream))
            done = torch.cuda.Event()
            done.record(self._stream)
        self._wait(done, tick)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _wait(self, done: torch.cuda.Event, tick: Tick) -> None:
        """Return when the stream is done; abort the communicator when it takes too long."""
        deadline, looked = time.monotonic() + self._timeout, time.monotonic()
        state = ctypes.c_int(0)
        while not done.query():
            now = time.monotonic()
            if now - looked > TICK_SECONDS:
                looked = now
                tick()
                nccl_library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state))
            if state.value or now > deadline:
                self.close()
                why = _message(state.value) if state.value else f"silent for {self._timeout:g} s"
                raise WeightUpdateError(f"the sender is gone: {why}", 502)

    def close(self) -> None:
        """Abort the communicator: what it waits for ends, here alone."""
        if self._communicator:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
            nccl_library().ncclCommAbort(communicator)


def _check(result: int) -> None:
    if result:
        raise WeightUpdateError(f"NCCL: {_message(result)}", 502)


def _message(result: int) -> str:
    return str(nccl_library().ncclGetErrorString(result).decode())
