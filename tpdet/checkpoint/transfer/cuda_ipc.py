"""Tensors in a trainer's GPU memory that this rank's GPU opens: no byte leaves the host.

Each tensor has a handle for every GPU that holds a copy, by that GPU's UUID: base64 of JSON

    {"handle": base64 of cudaIpcMemHandle_t, "offset": bytes, "size": bytes}

`handle` opens the allocation, in which the tensor's bytes lie from `offset` on. vLLM's form, which
names Python functions to call, is refused.
"""

import base64
import binascii
import ctypes
from collections.abc import Sequence
from functools import cache

import msgspec
import torch

from tpdet.checkpoint.transfer.announced import AnnouncedTensor
from tpdet.checkpoint.transfer.carriers import Take, Tick, chunks_of
from tpdet.control.weight_orders import TensorsInfo
from tpdet.errors import WeightUpdateError

HANDLE_BYTES = 64
GROUP_BYTES = 512 << 20
"""Tensors of about so many bytes are handed over together: each time the GPU is waited for."""
_LAZY_PEER_ACCESS = 1


class IpcHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor's bytes lie: an allocation's handle (base64), and the bytes before them."""

    handle: str
    offset: int
    size: int


class _MemoryHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


def parse_handle(text: str, tensor: AnnouncedTensor) -> tuple[bytes, int]:
    """The 64 bytes of a handle and the offset of a tensor. Raises WeightUpdateError (400)."""
    try:
        entry = msgspec.json.decode(base64.b64decode(text, validate=True), type=IpcHandle)
        handle = base64.b64decode(entry.handle, validate=True)
    except (binascii.Error, msgspec.DecodeError) as error:
        raise WeightUpdateError(
            f"ipc_handles of tensor {tensor.name} are no base64 of JSON with handle, offset and "
            f"size ({error}): a form that names functions to call is not read"
        ) from None
    if len(handle) != HANDLE_BYTES or entry.offset < 0 or entry.size != tensor.size:
        raise WeightUpdateError(
            f"ipc_handles of tensor {tensor.name}: a handle of {len(handle)} bytes, offset "
            f"{entry.offset}, {entry.size} bytes; it takes {HANDLE_BYTES}, 0 or more, {tensor.size}"
        )
    return handle, entry.offset


class IpcCarrier:
    """Reads tensors out of another process's GPU memory; the sender keeps them meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)

    def receive(
        self, tensors: Sequence[AnnouncedTensor], info: TensorsInfo, take: Take, tick: Tick
    ) -> None:
        """Hand over each tensor where it lies. Raises WeightUpdateError (400)."""
        if len(info.ipc_handles) != len(tensors):
            raise WeightUpdateError(
                f"{len(info.ipc_handles)} ipc_handles for {len(tensors)} tensors: send one each"
            )
        handles = dict(zip((tensor.name for tensor in tensors), info.ipc_handles, strict=True))
        opened: dict[bytes, int] = {}
        try:
            for group in chunks_of(tensors, GROUP_BYTES):
                values = {}
                for tensor in group:
                    handle, offset = parse_handle(self._own(handles[tensor.name], tensor), tensor)
                    if handle not in opened:
                        opened[handle] = _open(handle, self._device)
                    values[tensor.name] = _at(opened[handle] + offset, tensor, self._device)
                take(values)
                tick()
            torch.cuda.synchronize(self._device)
        finally:
            for address in opened.values():
                _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(address))

    def _own(self, handles: dict[str, str], tensor: AnnouncedTensor) -> str:
        """The handle of a tensor on this rank's GPU. Raises WeightUpdateError."""
        text = handles.get(self._uuid) or handles.get(f"GPU-{self._uuid}")
        if text is None:
            raise WeightUpdateError(
                f"ipc_handles of tensor {tensor.name} name {', '.join(handles)}: this rank has GPU "
                f"{self._uuid}"
            )
        return text

    def close(self) -> None:
        """Nothing stays open between two calls."""


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process already."""
    major = str(torch.version.cuda).split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), _MemoryHandle, ctypes.c_uint,
    ]  # fmt: skip
    return library


def _open(handle: bytes, device: torch.device) -> int:
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        result = _runtime().cudaIpcOpenMemHandle(
            ctypes.byref(address), _MemoryHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
    if result or address.value is None:
        message = _runtime().cudaGetErrorString(result).decode()
        raise WeightUpdateError(f"the sender's GPU memory cannot be opened: {message}")
    return address.value


class _Memory:
    """Bytes at an address of the GPU, as `torch.as_tensor` reads it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _at(address: int, tensor: AnnouncedTensor, device: torch.device) -> torch.Tensor:
    raw = torch.as_tensor(_Memory(address, tensor.size), device=device)
    return raw.view(tensor.dtype).view(tensor.shape)
