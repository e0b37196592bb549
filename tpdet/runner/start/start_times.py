"""The times of a start's phases, for one line in the log and a metric."""

import logging
import time
from collections.abc import Callable

CHECKING = "checking the kernels"
LOADING = "loading the weights"
TRYING = "trying the kernels and every size of step"
MAKING_PAGES = "making the KV pages and CUDA graphs"

_log = logging.getLogger("tpdet.engine")


class StartTimes:
    """Phases one after the other: `mark` ends one, and time with no mark belongs to the next."""

    doing = CHECKING
    """What the start does now, for an error that tells of it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.kernels = 0
        """Kernels that were known before their first use: compiled ahead or found compiled."""
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def mark(self, phase: str) -> None:
        """What was done since the last mark was `phase`; a phase may come in several parts."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the last mark."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"{self.total:.1f} s ({parts})"

    def announce(self, rank: int) -> None:
        """Say in rank 0's log how long it took."""
        if rank == 0:
            ahead = f", {self.kernels} kernels known ahead" if self.kernels else ""
            _log.info("engine up in %s%s", self, ahead)
