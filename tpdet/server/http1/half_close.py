"""Finds out whether a client that half-closed its connection still reads.

The end of a client's input looks the same whether the client half-closed the connection, which
HTTP/1.1 allows and which must get its answer, or left it. A few bytes tell the two apart: the
system of a client that left answers them with a reset, and then the connection is closed here too.
"""

import asyncio
import socket
from collections.abc import Callable

_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 5.0
_TCP_CLOSE = 7  # of Linux's tcp_info.tcpi_state


class ReaderWatch:
    """Asks by `probe` ever less often; closes the connection of a client that left."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], None]) -> None:
        self._transport, self._probe = transport, probe
        self._pause = _FIRST_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _is_reset(self._transport):
            self._transport.abort()
            return
        self._probe()
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)
        self._pause = min(2 * self._pause, _LONGEST_SECONDS)


def _is_reset(transport: asyncio.Transport) -> bool:
    connection = transport.get_extra_info("socket")
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return bool(state[0] == _TCP_CLOSE)
