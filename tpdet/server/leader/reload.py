"""Weight reload in rank 0's loop: refuse new requests, finish running ones, load, serve again.

The HTTP process hears of the new weights before anything is accepted under them, on the same
ordered connection, so each answer names the weights that it was computed with. Whoever asked for a
reload is told its result once every HTTP process takes requests again, or refuses them otherwise.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tpdet.errors import CheckpointError, ReloadError
from tpdet.launch.life.reload_request import (
    ReloadAnswer,
    ReloadRequest,
    answer_reload,
    pending_reload,
)
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.server.leader.bridge import Bridge
from tpdet.server.leader.canary import Canary

if TYPE_CHECKING:
    from tpdet.engine import Engine

LOOK_SECONDS = 0.1

_log = logging.getLogger("tpdet.server")


class Reload:
    """At most one reload at a time. `announce` publishes the new weights' facts."""

    def __init__(
        self,
        run: RunDirectory,
        engine: "Engine",
        bridge: Bridge,
        canary: Canary,
        announce: Callable[[], None],
    ) -> None:
        self._run, self._engine, self._bridge, self._canary = run, engine, bridge, canary
        self._announce = announce
        self._looked = 0.0
        self._deadline = 0.0
        self._wanted: ReloadRequest | None = None
        self._result: ReloadAnswer | None = None

    @property
    def begun(self) -> bool:
        """Whether new requests are refused because of a reload."""
        return self._wanted is not None

    def look(self) -> None:
        """Look for a reload request in the run directory, at most ten times a second."""
        if self._result is not None:
            return
        now = time.monotonic()
        if self.begun or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._wanted = pending_reload(self._run)
        if self._wanted is not None:
            self._deadline = now + self._wanted.patience
            model = self._wanted.model or self._engine.config.model
            _log.info("reload of %s: new requests are refused until it is done", model)

    def refuse(self, why: str) -> None:
        """Answer a reload that cannot be: the server is ending, or is not to be trusted."""
        if self._wanted is not None:
            self._answer(75, "refused", why)

    def tell(self, ending: bool = False) -> None:
        """Write the result of a reload that has ended, once every HTTP process goes by it.

        ending: the server is about to end, and waits for none.
        """
        if self._result is not None and (ending or self._bridge.reached()):
            result, self._result = self._result, None
            answer_reload(self._run, result)

    def go_on(self) -> bool:
        """Load once no client's request can run; True if loading was tried. Called each round."""
        if self._wanted is None:
            return False
        self._canary.abandon()
        if not self._bridge.has_work(self._engine) or not self._engine.weights.usable:
            self._load(self._wanted.model or self._engine.config.model)
            return True
        if time.monotonic() > self._deadline:
            waited = f"requests still ran after {self._wanted.patience:g} s"
            remedy = "the old weights serve on; try again later, or with a longer --patience"
            self._answer(75, "busy", f"{waited}: {remedy}")
        return False

    def _load(self, model: str) -> None:
        began, engine = time.monotonic(), self._engine
        before = engine.system_fingerprint
        try:
            engine.reload(model, lambda: self._bridge.report(engine))
        except ReloadError as error:
            self._answer(error.exit_code, error.code, str(error))
            return
        try:
            if engine.has_work:  # held up by torn weights: nothing may be answered before them
                self._canary.forget()
            else:
                self._canary.renew()
        except CheckpointError as error:
            self._announce()
            what = "the server takes no requests until other weights are loaded"
            self._answer(error.exit_code, error.code, f"{error}; {what}")
            return
        self._announce()
        seconds = time.monotonic() - began
        _log.warning(
            "weights of %s loaded in %.1f s: %s was %s",
            model,
            seconds,
            engine.system_fingerprint,
            before,
        )
        self._answer(0, "reloaded", f"{model} loaded in {seconds:.1f} s")

    def _answer(self, exit_code: int, code: str, message: str) -> None:
        assert self._wanted is not None
        if exit_code:
            _log.warning("no reload of %s: %s", self._wanted.model or "the weights", message)
        fingerprint = self._engine.system_fingerprint
        self._result = ReloadAnswer(self._wanted.id, exit_code, code, message, fingerprint)
        self._wanted = None
