"""Accepts connections on a socket that several processes accept on, about as many in each.

All of them are woken for a connection. One that has more than another leaves it to the others for
a moment, and takes it if nobody did.
"""

import asyncio
import socket
from collections.abc import Callable

from tpdet.server.front.tally import SharedTally

PAUSE_SECONDS = 0.002
FULL_SECONDS = 1.0  # after which it is tried again where no file can be opened


class Acceptor:
    """One process's end of a listening socket; `tally` says how many connections each has."""

    def __init__(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], tally: SharedTally
    ) -> None:
        self._listener, self._make, self._tally = listener, make, tally
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._woken)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()

    def _woken(self) -> None:
        if self._tally.ahead("connections"):
            self._pause(PAUSE_SECONDS)
        else:
            self._take()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._woken)
        self._take()  # others may be held up

    def _take(self) -> None:
        """Accept one connection, if there is one."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client left
        except OSError:
            self._pause(FULL_SECONDS)
            return
        connection.setblocking(False)
        accepted = self._loop.connect_accepted_socket(self._make, connection)
        task: asyncio.Task[object] = self._loop.create_task(accepted)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
