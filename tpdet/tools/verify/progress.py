"""Shows the progress of a verification: the plan, then each run with the time that is left.

A run tells how far it is by a file in its folder, which its rank 0 writes and the command reads.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

QUIET_SECONDS = 10.0
"""A run that takes longer says again how far it is."""
_POLL_SECONDS = 0.5
_LEAST_DONE = 0.05  # the first circumstance waits for what is loaded and compiled
_FILE = "progress"


class RunProgress:
    """Counts runs (worlds of ranks), which may overlap. `expected`: seconds of a run, or None."""

    def __init__(
        self,
        console: Console,
        runs: int,
        expected: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._runs, self._expected, self._clock = console, runs, expected, clock
        self._begun = self._ended = 0
        self._parts: dict[int, float] = {}  # of runs under way, the share that is done
        self._since = self._said = clock()
        self._lock = threading.Lock()

    def plan(self) -> None:
        """Print how many runs there will be, and how long they take if that is known."""
        about = "" if self._expected is None else f", about {duration(self._runs * self._expected)}"
        self._say(f"{self._runs} runs{about}")

    def begin(self, what: str) -> int:
        """Print that a run begins and roughly the time that is left; returns the run's number."""
        with self._lock:
            self._begun += 1
            self._parts[self._begun] = 0.0
            self._say(f"{self._begun} of {self._runs}: {what}{self._left()}")
            return self._begun

    def inside(self, number: int, done: int, total: int) -> None:
        """Note that a run has done a part of its circumstances; printed now and then."""
        with self._lock:
            self._parts[number] = done / total
            if done and self._clock() - self._said >= QUIET_SECONDS:
                which = f"{number} of {self._runs}: {done} of {total} circumstances"
                self._say(which + self._left())

    def end(self, number: int) -> None:
        """Count a run that has ended."""
        with self._lock:
            del self._parts[number]
            self._ended += 1

    @contextlib.contextmanager
    def watched(self, what: str, folder: Path) -> Iterator[None]:
        """Count a run from its begin to its end, and read meanwhile how far it is."""
        number, over = self.begin(what), threading.Event()

        def watch() -> None:
            while not over.wait(_POLL_SECONDS):
                with contextlib.suppress(FileNotFoundError, ValueError):
                    done, total = map(int, (folder / _FILE).read_text().split())
                    self.inside(number, done, total)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.end(number)

    def _left(self) -> str:
        """Roughly the time that is left, once a part of the runs that says something is done."""
        done = self._ended + sum(self._parts.values())
        if done < _LEAST_DONE * self._runs:
            return ""
        seconds = (self._clock() - self._since) / done * (self._runs - done)
        return f", about {duration(seconds)} left"

    def _say(self, text: str) -> None:
        self._said = self._clock()
        self._console.print(text, style="dim", highlight=False)


class CircumstancesDone:
    """Writes for `Progress.watched` how many circumstances of a run are done, of `total`."""

    def __init__(self, folder: Path, total: int) -> None:
        self._path, self._done, self._total = folder / _FILE, 0, total

    def one_more(self) -> None:
        """Count one."""
        self._done += 1
        # Shorter than a block, so a reader sees all of it or nothing.
        self._path.write_text(f"{self._done} {self._total}")


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "3 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
