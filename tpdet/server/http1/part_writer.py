"""Writes parts of a running answer straight to its connection, without a task that waits for it."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class PartWriter:
    """The connection of one answer. Between two parts of ASGI's it takes others."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the answer is a running stream whose reader is there and not behind."""
        cycle = self._cycle
        running = cycle.chunked_encoding and not (cycle.disconnected or cycle.response_complete)
        return bool(running) and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a part that is not empty; only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
