"""Idle time is used to look through the engine's books; what is found closes the server."""

import logging
import time
from typing import TYPE_CHECKING

from tpdet.errors import IntegrityError

if TYPE_CHECKING:
    from tpdet.engine import Engine

_log = logging.getLogger("tpdet.server")


class Books:
    """Runs `Engine.check_integrity` every `interval` seconds of an idle server.

    A finding is never forgotten: pages that are not whose the books say could answer one request
    with another's, so the server takes no more requests and its log says what was found.
    """

    def __init__(self, engine: "Engine", interval: float) -> None:
        self._engine, self._interval = engine, interval
        self._looked = time.monotonic()
        self.finding: str | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing was found so far."""
        return self.finding is None

    def look_if_due(self) -> None:
        """Look, if it is time; to be called when the engine has nothing to do."""
        now = time.monotonic()
        if not self.sound or now - self._looked < self._interval:
            return
        self._looked = now
        try:
            self._engine.check_integrity()
        except IntegrityError as error:
            self.finding = str(error)
            _log.error(
                "the engine's books are damaged: %s; the server takes no more requests, restart it",
                error,
            )
