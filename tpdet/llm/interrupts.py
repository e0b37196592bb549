"""Delays Ctrl-C during a call until the engine is between two steps, so that it stays usable."""

import signal
import threading
import time
from types import FrameType

ONE_PRESS_SECONDS = 1.0
"""Two signals within this time are one press: a launcher repeats the terminal's signal."""


class Interrupts:
    """While inside, the first Ctrl-C takes effect at `check` or at the end; a second one at once.

    Does nothing outside of the main thread, and where the user's code handles SIGINT.
    """

    def __init__(self) -> None:
        self._pressed: float | None = None  # time.monotonic() of the first press
        self._holds = False

    def __enter__(self) -> "Interrupts":
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
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
