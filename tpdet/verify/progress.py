"""Shows the progress of a verification: the plan, then each run with the time that is left."""

import threading
import time
from collections.abc import Callable

from rich.console import Console


class Progress:
    """Counts runs (worlds of ranks), which may overlap. `guess`: seconds of a run, or None."""

    def __init__(
        self,
        console: Console,
        runs: int,
        guess: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._runs, self._guess, self._clock = console, runs, guess, clock
        self._begun = self._ended = 0
        self._since = clock()
        self._lock = threading.Lock()

    def plan(self) -> None:
        """Print how many runs there will be, and how long they take if that is known."""
        about = "" if self._guess is None else f", about {duration(self._runs * self._guess)}"
        self._say(f"{self._runs} runs{about}")

    def begin(self, what: str) -> None:
        """Print that a run begins: its number, its name, and roughly the time that is left."""
        with self._lock:
            self._begun += 1
            left = ""
            if self._ended:
                each = (self._clock() - self._since) / self._ended
                left = f", about {duration(each * (self._runs - self._ended))} left"
            self._say(f"{self._begun} of {self._runs}: {what}{left}")

    def end(self) -> None:
        """Count a run that has ended."""
        with self._lock:
            self._ended += 1

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "3 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
