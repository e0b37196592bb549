"""Frames: how a byte message of any length travels in tensors of fixed length.

A frame is a 20-byte header and the first bytes of the payload. Each collective of gloo costs
milliseconds on a busy machine, so a short message takes one collective: that of the frames. The
rest of a longer message follows in a second one, whose length every rank knows from the headers.

Header, little endian: magic "TPDF", operation (u16), format version (u16), sequence number (u32),
payload length (u64). A receiver MUST refuse another magic, version or operation, a sequence
number that is not its own, and a length over the cap. Nothing is unpickled.
"""

import struct

import torch
from torch import Tensor

from tpdet.comm.world.world import MAX_MESSAGE_BYTES
from tpdet.errors import PeerLostError

BROADCAST_FRAME = 4096
"""Bytes of a broadcast's first frame: a step plan of a few hundred short rows fits."""
GATHER_FRAME = 1024
"""Bytes of a gather's first frame, from every rank to every rank: many digests fit."""

OPERATIONS = ("broadcast_bytes", "gather_bytes", "barrier")

_HEADER = struct.Struct("<4sHHIQ")
_MAGIC = b"TPDF"
_VERSION = 1
_SEQUENCE_MASK = 2**32 - 1  # sequence numbers travel in 32 bits


def pack_frame(operation: str, sequence: int, payload: bytes, frame_bytes: int) -> Tensor:
    """The message's first frame: uint8 [frame_bytes], zero-padded after a short payload."""
    header = _HEADER.pack(
        _MAGIC, OPERATIONS.index(operation), _VERSION, sequence & _SEQUENCE_MASK, len(payload)
    )
    frame = bytearray(frame_bytes)
    frame[: _HEADER.size] = header
    inline = payload[: inline_bytes(frame_bytes)]
    frame[_HEADER.size : _HEADER.size + len(inline)] = inline
    return torch.frombuffer(frame, dtype=torch.uint8)


def unpack_frame(frame: Tensor, operation: str, sequence: int, sender: int) -> tuple[int, bytes]:
    """(payload length, the payload's first bytes) of a received frame.

    Raises PeerLostError naming the sender if the header is not the one that this rank waits for:
    the sender has diverged, and nothing that it sends can be used.
    """
    data = frame.numpy().tobytes()
    magic, code, version, number, length = _HEADER.unpack_from(data)
    expected = (_MAGIC, OPERATIONS.index(operation), _VERSION, sequence & _SEQUENCE_MASK)
    if (magic, code, version, number) != expected:
        name = OPERATIONS[code] if code < len(OPERATIONS) else f"operation {code}"
        raise PeerLostError(
            f"rank {sender} diverged: it sent {name} number {number} (format {version}, magic "
            f"{magic!r}) where {operation} number {expected[3]} (format {_VERSION}) was due"
        )
    if length > MAX_MESSAGE_BYTES:
        raise PeerLostError(
            f"rank {sender} diverged: it announced {length} bytes in {operation}, over the cap of "
            f"{MAX_MESSAGE_BYTES}"
        )
    return length, data[_HEADER.size : _HEADER.size + min(length, inline_bytes(len(data)))]


def inline_bytes(frame_bytes: int) -> int:
    """How many bytes of payload fit into a first frame of `frame_bytes`."""
    return frame_bytes - _HEADER.size


def pack_rest(payload: bytes, frame_bytes: int, rest_bytes: int) -> Tensor:
    """The payload after the first frame, zero-padded: uint8 [rest_bytes]."""
    rest = bytearray(rest_bytes)
    tail = payload[inline_bytes(frame_bytes) :]
    rest[: len(tail)] = tail
    return torch.frombuffer(rest, dtype=torch.uint8)
