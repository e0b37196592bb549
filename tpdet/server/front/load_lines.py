"""Log lines of load: throughput, queue and cache usage, as vLLM prints them, and an alarm.

The alarm is for a batch size that swings, as the time of a step swings with it.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Status

_log = logging.getLogger("tpdet.server")


async def log_every(seconds: float, level: int, line: Callable[[], str | None]) -> None:
    """Log a line every `seconds`, for ever, where there is one."""
    while True:
        await asyncio.sleep(seconds)
        text = line()
        if text is not None:
            _log.log(level, "%s", text)


class StatisticsLine:
    """Rates since the last line; silent when nothing ran since then and nothing runs."""

    def __init__(self, metrics: Metrics, status: Callable[[], Status]) -> None:
        self._metrics, self._status = metrics, status
        self._last = (time.monotonic(), 0.0, 0.0)
        self._busy = False

    def line(self) -> str | None:
        """The next line; None while the server is idle."""
        now = time.monotonic()
        total = self._metrics.tally.total
        prompt, generated = total("prompt_tokens"), total("generation_tokens")
        then, prompt_then, generated_then = self._last
        self._last = now, prompt, generated
        status = self._status()
        busy = bool(
            status.running or status.waiting or self._last[1:] != (prompt_then, generated_then)
        )
        # One line more when it falls still, so that the last one says so.
        silent, self._busy = not busy and not self._busy, busy
        if silent:
            return None
        span = max(now - then, 1e-9)
        pieces = [
            f"Avg prompt throughput: {(prompt - prompt_then) / span:.1f} tokens/s",
            f"Avg generation throughput: {(generated - generated_then) / span:.1f} tokens/s",
            f"Running: {status.running} reqs",
            f"Waiting: {status.waiting} reqs",
        ]
        used, free = (status.counters.get(name, 0.0) for name in ("pages_used", "pages_free"))
        if used + free:
            pieces.append(f"KV cache usage: {100 * used / (used + free):.1f}%")
        queried = status.counters.get("prefix_query_tokens", 0.0)
        hit = status.counters.get("prefix_hit_tokens", 0.0)
        pieces.append(f"Prefix cache hit rate: {100 * hit / queried if queried else 0.0:.1f}%")
        drafted = status.counters.get("draft_tokens", 0.0)
        if drafted:
            right = status.counters.get("accepted_draft_tokens", 0.0)
            pieces.append(f"Draft acceptance rate: {100 * right / drafted:.1f}%")
        return ", ".join(pieces)


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
