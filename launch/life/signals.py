"""Stop signals: SIGTERM, SIGINT, SIGHUP and SIGQUIT all mean stop, and only set a flag.

torchrun also sends SIGTERM to the survivors when one rank dies, so a rank that finds the flag set
first checks its peers (`lifecycle.check_peers`).
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpdet.launch.host.processes import children_of, send_signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN_SECONDS = 0.2


def interrupt_at_stop() -> None:
    """Every stop signal raises KeyboardInterrupt in the main thread from now on."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def raising() -> Iterator[None]:
    """SIGTERM and SIGHUP end the children and raise SystemExit while inside.

    A command's temporary files are then removed as at its normal end. Does nothing outside the main
    thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    code: list[int] = []

    def end(number: int, frame: object) -> None:
        for stop in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(stop, signal.SIG_IGN)  # a second one would interrupt the tidying up
        for child in children_of(os.getpid()):
            send_signal(child.pid, child.start_time, signal.SIGTERM)
        code.append(128 + number)
        kept[signal.SIGALRM] = signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise SystemExit(code[0])

    def again(number: int, frame: object) -> None:
        # Python drops what is raised while it calls back from a fork, or from a finalizer.
        if code and sys.exc_info()[1] is None:
            raise SystemExit(code[0])

    kept = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except BaseException:
        if not code:
            raise
    finally:
        if code:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in kept.items():
            signal.signal(number, handler)
    if code:  # whatever else came of the signal, such as a child that failed by it
        raise SystemExit(code[0])


class StopSignals:
    """The flag and a descriptor that becomes readable with each stop signal.

    The kernel-level handler writes to the descriptor at once, even while the main thread is
    inside a collective; Python-level handlers run only when that returns. Read it in one place:
    `wait`, a poller on `fileno` with `read`, or the thread of `watch`.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def install(self) -> None:
        """Take over the stop signals; main thread only. A process does it once.

        A rank does it just before it registers in the run directory: until then the default
        action (to end) is the right one.
        """
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self._first is None:
            self._first = number

    @property
    def requested(self) -> int | None:
        """The first stop signal that came, or None."""
        return self._first

    def fileno(self) -> int:
        """A descriptor for select and pollers; readable when `read` has something."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The stop signals that came since the last call, in order; never waits."""
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        # The wake-up descriptor hears of every handled signal, ours or not.
        stops = [number for number in numbers if number in STOP_SIGNALS]
        if stops:
            self._note(stops[0], None)
        return stops

    def wait(self, seconds: float) -> list[int]:
        """Like `read`, after waiting up to `seconds` for a signal."""
        select.select([self._reader], [], [], seconds)
        return self.read()

    @contextmanager
    def acting(self, action: Callable[[], None]) -> Iterator[None]:
        """While inside, call `action` at each stop signal, at once and from another thread.

        A signal that comes later is kept for `read`.
        """
        done, end = socket.socketpair()

        def run() -> None:
            while done not in select.select([done, self._reader], [], [])[0]:
                if self.read():
                    action()

        thread = threading.Thread(target=run, name="stop signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.close()
            thread.join()
            done.close()

    def watch(self, action: Callable[[int], None]) -> None:
        """Call `action(signal number)` for each stop signal, from a daemon thread, at once."""

        def run() -> None:
            while True:
                for number in self.wait(3600.0):
                    action(number)

        threading.Thread(target=run, name="stop signals", daemon=True).start()
