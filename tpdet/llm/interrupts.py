"""Ctrl-C during a call: it takes effect between two steps, where it leaves the engine whole."""

import signal
import threading
import time
from types import FrameType, TracebackType

ONE_PRESS_SECONDS = 1.0
"""A launcher passes on the signal that the terminal sent to its ranks already."""


class Interrupts:
    """While inside, the first Ctrl-C waits for `look` or for the end; a later one does not.

    Nothing changes outside of the main thread and where somebody else handles SIGINT.
    """

    def __init__(self) -> None:
        self._pressed: float | None = None  # when, of the clock that never goes back
        self._holds = False

    def __enter__(self) -> "Interrupts":
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.look()

    def look(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pressed is not None:
            self._pressed = None
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._pressed is None:
            self._pressed = now
        elif now - self._pressed > ONE_PRESS_SECONDS:
            raise KeyboardInterrupt
