"""An alarm for a batch size that swings, as the time of a step swings with it."""

import asyncio
import logging
from collections.abc import Callable

from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Status

_log = logging.getLogger("tpdet.server")


class BatchSwing:
    """Compares the mean batch size of each window with that of the one before.

    The batch size of a step is how many sequences it ran; a window in which no step ran says
    nothing and is left out. The change is always a metric; `alarm` is the share of the former mean
    past which a window counts as an alarm and is logged, 0 for never: where load comes and goes,
    so does the batch size.
    """

    def __init__(self, metrics: Metrics, status: Callable[[], Status], alarm: float) -> None:
        self._metrics, self._status, self._alarm = metrics, status, alarm
        self._mean: float | None = None
        self._last = self._totals()

    async def repeat(self, seconds: float) -> None:
        """Look at windows of `seconds`, for ever."""
        while True:
            await asyncio.sleep(seconds)
            line = self.line()
            if line is not None:
                _log.warning("%s", line)

    def line(self) -> str | None:
        """End a window; the line of the alarm, None if there is none."""
        before, self._last = self._last, self._totals()
        batches = self._last[0] - before[0]
        if batches <= 0:
            return None
        former, self._mean = self._mean, (self._last[1] - before[1]) / batches
        if former is None:
            return None
        swing = abs(self._mean - former) / former
        alarmed = 0.0 < self._alarm < swing
        self._metrics.batch_swing(swing, alarmed)
        if not alarmed:
            return None
        return (
            f"batch size swings: {self._mean:.1f} sequences a step on average, {former:.1f} in "
            f"the window before: {100 * swing:.0f} % is over the alarm at {100 * self._alarm:g} %"
        )

    def _totals(self) -> tuple[float, float]:
        counters = self._status().counters
        return counters.get("batches", 0.0), counters.get("batched_rows", 0.0)
