"""Receipts of several HTTP processes, on their way to the one that writes them all.

Rank 0 makes a pair of sockets for each further process, and both ends get them by inheritance, as
nobody else can. A process sends a batch of sealed receipts and waits for the word on each; the
writer answers once they are durable. A message is its length, u64 little-endian, and msgpack.
"""

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from tpdet.audit.receipts.writer import ReceiptWriter, SealedReceipt
from tpdet.errors import AuditUnavailableError

_LENGTH = struct.Struct("<Q")
_Message = TypeVar("_Message")


class RemoteWriter:
    """A `ReceiptWriter` of another HTTP process, for one thread."""

    def __init__(self, descriptor: int) -> None:
        self._channel = _Channel(descriptor)

    def write(self, batch: Sequence[SealedReceipt]) -> list[str | None]:
        """As of a `ReceiptWriter`. Raises AuditUnavailableError once its process has ended."""
        try:
            self._channel.send(batch)
            return self._channel.receive(list[str | None])
        except (OSError, EOFError) as error:
            raise AuditUnavailableError(
                "the HTTP process that writes all receipts has ended: the log says why"
            ) from error

    def close(self) -> None:
        """Tell the writer that nothing follows."""
        self._channel.close()


class SharedWriter:
    """The writer, for this process's thread, and for other HTTP processes as long as they live."""

    def __init__(self, writer: ReceiptWriter, descriptors: Sequence[int]) -> None:
        self._writer = writer
        self.write = writer.write
        self._threads = [
            threading.Thread(
                target=self._serve, args=(_Channel(one),), daemon=True, name="receipts-of-others"
            )
            for one in descriptors
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give the directory back once every other process has said or shown that it ended."""
        for thread in self._threads:
            thread.join()
        self._writer.close()

    def _serve(self, channel: "_Channel") -> None:
        with suppress(OSError, EOFError):
            while True:
                batch = channel.receive(list[SealedReceipt])
                words: list[str | None]
                try:
                    words = self._writer.write(batch)
                except Exception as error:
                    words = [str(error)] * len(batch)
                channel.send(words)
        channel.close()


class _Channel:
    """One end of a pair of stream sockets."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)

    def send(self, message: Sequence[SealedReceipt | str | None]) -> None:
        """Send a message; waits while the other end is behind. Raises OSError."""
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)))
        self._socket.sendall(data)

    def receive(self, kind: type[_Message]) -> _Message:
        """The next message. Raises EOFError at the other end's end, and OSError."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return msgspec.msgpack.decode(self._exactly(length), type=kind)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return data
