"""Repeats the last log line, with its age, while a start takes long."""

import logging
import threading
import time
from types import TracebackType

QUIET_SECONDS = 5.0

_log = logging.getLogger("tpdet.waiting")


class Waiting(logging.Handler):
    """While it is open, a log line at least every `seconds`: "loading weights: 10 s so far"."""

    def __init__(self, seconds: float = QUIET_SECONDS) -> None:
        super().__init__(logging.INFO)
        self._seconds = seconds
        self._said: str | None = None
        self._since = self._last = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> "Waiting":
        logging.getLogger("tpdet").addHandler(self)
        threading.Thread(target=self._repeat, name="waiting", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("tpdet").removeHandler(self)
        self._over.set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note the last line; a warning is no progress."""
        self._last = time.monotonic()
        if record.levelno == logging.INFO and record.name != _log.name:
            self._said, self._since = record.getMessage(), self._last

    def _repeat(self) -> None:
        while not self._over.wait(max(0.0, self._last + self._seconds - time.monotonic())):
            now = time.monotonic()
            if now - self._last < self._seconds:
                continue
            self._last = now
            if self._said is not None:
                _log.info("%s: %.0f s so far", self._said, now - self._since)
