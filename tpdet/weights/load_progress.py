"""How far the reading of weights is: a bar, or lines where the log takes them."""

import logging
import time
from collections.abc import Callable

from tqdm import tqdm

LINE_SECONDS = 5.0

_log = logging.getLogger("tpdet.engine")


class LoadProgress:
    """Counts tensors, of `total` if that is known. Shows nothing unless asked to.

    A server logs a line every few seconds; else there is a bar, on a terminal.
    """

    def __init__(
        self, total: int | None, show: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._clock = total, clock
        self._logs = show and _log.isEnabledFor(logging.INFO)
        self._read = 0
        self._told = clock()
        bar = show and not self._logs
        self._bar = tqdm(total=total, desc="weights", unit="tensor", disable=None if bar else True)

    def step(self) -> None:
        """One tensor more was read."""
        self._bar.update()
        self._read += 1
        if self._logs and self._clock() - self._told >= LINE_SECONDS:
            self._told = self._clock()
            _log.info("loading weights: %s", self._so_far())

    def close(self) -> None:
        """All are read."""
        self._bar.close()

    def _so_far(self) -> str:
        if self._total is None:
            return f"{self._read} tensors"
        return f"{100 * self._read // self._total} %, {self._read} of {self._total} tensors"
