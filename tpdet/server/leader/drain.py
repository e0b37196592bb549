"""The drain: after a stop signal running requests may finish, and new ones are refused."""

import logging
import signal
import time
from typing import TYPE_CHECKING

from tpdet.errors import DrainTimeoutError
from tpdet.launch.life.lifecycle import check_peers
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.launch.life.signals import StopSignals

if TYPE_CHECKING:
    from tpdet.engine import Engine

_log = logging.getLogger("tpdet.server")


class Drain:
    """A stop signal begins it, once the peers are known to be well; past its time it is forced."""

    def __init__(self, signals: StopSignals, run: RunDirectory, timeout: float) -> None:
        self._signals, self._run, self._timeout = signals, run, timeout
        self._deadline: float | None = None

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._deadline is not None

    def look(self, engine: "Engine") -> None:
        """Read the stop signals. Raises PeerLostError if they stand for a lost peer."""
        if not self._signals.read() and (self.begun or self._signals.requested is None):
            return
        check_peers(self._run, 0)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout
            if engine.has_work:
                name = signal.Signals(self._signals.requested or signal.SIGTERM).name
                _log.info("draining after %s: running requests get %g s", name, self._timeout)

    def look_from_update(self, engine: "Engine") -> None:
        """Look while a weight update waits for its sender, which may be silent for long.

        Raises DrainTimeoutError past the drain's time, and as `look`.
        """
        self.look(engine)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DrainTimeoutError(
                f"a weight update still waited for its sender {self._timeout:g} s after the stop "
                "signal: stop the sender first, or raise --drain-timeout"
            )

    def force_if_overdue(self, engine: "Engine") -> None:
        """Raise DrainTimeoutError when requests still run past the drain's time.

        Where an update has left the weights incomplete they cannot end, and get no time.
        """
        if self._deadline is None or not engine.has_work:
            return
        found = engine.statistics()
        count = found.requests_running + found.requests_waiting
        if engine.weights.state == "torn":
            error = DrainTimeoutError(
                f"{count} requests waited for weights, and those here are incomplete: bring them "
                "all, or end the requests by /abort_requests, before the server is stopped"
            )
            error.public = "its weights are incomplete"
            raise error
        if time.monotonic() > self._deadline:
            raise DrainTimeoutError(
                f"{count} requests still ran {self._timeout:g} s after the stop signal: raise "
                "--drain-timeout to let them finish"
            )
