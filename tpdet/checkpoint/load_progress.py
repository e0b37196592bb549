"""Shows how far the reading of weights, or other counted work, is: a bar, or lines in a log."""

import logging
import time
from collections.abc import Callable

from tqdm import tqdm

from tpdet.launch.host.standard_streams import error_is_terminal

LINE_SECONDS = 5.0

_log = logging.getLogger("tpdet.engine")


class LoadProgress:
    """Counts what is done, out of `total` if that is known. Shows nothing unless `show`.

    A server logs a line every LINE_SECONDS; elsewhere a terminal shows a bar.
    """

    def __init__(
        self,
        total: int | None,
        show: bool,
        clock: Callable[[], float] = time.monotonic,
        doing: str = "loading weights",
        unit: str = "tensor",
    ) -> None:
        self._total, self._clock, self._doing, self._unit = total, clock, doing, unit
        self._logs = show and _log.isEnabledFor(logging.INFO)
        self._read = 0
        self._logged_at = clock()
        bar = show and not self._logs and error_is_terminal()
        self._bar = tqdm(total=total, desc=doing, unit=unit, disable=not bar)

    def step(self) -> None:
        """Count one more tensor."""
        self._bar.update()
        self._read += 1
        if self._logs and self._clock() - self._logged_at >= LINE_SECONDS:
            self._logged_at = self._clock()
            _log.info("%s: %s", self._doing, self._so_far())

    def close(self) -> None:
        """Remove the bar: all tensors are read."""
        self._bar.close()

    def _so_far(self) -> str:
        if self._total is None:
            return f"{self._read} {self._unit}s"
        return f"{100 * self._read // self._total} %, {self._read} of {self._total} {self._unit}s"
