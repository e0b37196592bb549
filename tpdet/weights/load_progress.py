"""Shows how far the reading of weights is: a progress bar, or lines in a log."""

import logging
import time
from collections.abc import Callable

from tqdm import tqdm

LINE_SECONDS = 5.0

_log = logging.getLogger("tpdet.engine")


class LoadProgress:
    """Counts the tensors read, out of `total` if that is known. Shows nothing unless `show`.

    A server logs a line every LINE_SECONDS; elsewhere a terminal shows a bar.
    """

    def __init__(
        self, total: int | None, show: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._clock = total, clock
        self._logs = show and _log.isEnabledFor(logging.INFO)
        self._read = 0
        self._logged_at = clock()
        bar = show and not self._logs
        self._bar = tqdm(total=total, desc="weights", unit="tensor", disable=None if bar else True)

    def step(self) -> None:
        """Count one more tensor."""
        self._bar.update()
        self._read += 1
        if self._logs and self._clock() - self._logged_at >= LINE_SECONDS:
            self._logged_at = self._clock()
            _log.info("loading weights: %s", self._so_far())

    def close(self) -> None:
        """Remove the bar: all tensors are read."""
        self._bar.close()

    def _so_far(self) -> str:
        if self._total is None:
            return f"{self._read} tensors"
        return f"{100 * self._read // self._total} %, {self._read} of {self._total} tensors"
