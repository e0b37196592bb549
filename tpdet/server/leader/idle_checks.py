"""Integrity checks of the page tables while the server is idle; a finding closes the server."""

import logging
import time
from typing import TYPE_CHECKING

from tpdet.errors import IntegrityError

if TYPE_CHECKING:
    from tpdet.engine import Engine

_log = logging.getLogger("tpdet.server")


class IdleChecks:
    """Runs `Engine.check_integrity` every `interval` seconds of an idle server.

    A finding is never forgotten. A page that is not the one its table names could answer one
    request with another's text, so the server takes no more requests and its log names the finding.
    """

    def __init__(self, engine: "Engine", interval: float) -> None:
        self._engine, self._interval = engine, interval
        self._checked = time.monotonic()
        self.finding: str | None = None

    @property
    def sound(self) -> bool:
        """Whether no check has found anything so far."""
        return self.finding is None

    def check_if_due(self) -> None:
        """Check, if it is time; to be called when the engine has nothing to do."""
        now = time.monotonic()
        if not self.sound or now - self._checked < self._interval:
            return
        self._checked = now
        try:
            self._engine.check_integrity()
        except IntegrityError as error:
            self.finding = str(error)
            _log.error(
                "the page tables are damaged: %s; the server takes no more requests, restart it",
                error,
            )
