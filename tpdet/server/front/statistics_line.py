"""The log line of throughput, queue and cache usage, every ten seconds, as vLLM prints it."""

import asyncio
import logging
import time
from collections.abc import Callable

from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Status

_log = logging.getLogger("tpdet.server")


class StatisticsLine:
    """Rates since the last line; silent when nothing ran since then and nothing runs."""

    def __init__(self, metrics: Metrics, status: Callable[[], Status]) -> None:
        self._metrics, self._status = metrics, status
        self._last = (time.monotonic(), 0.0, 0.0)
        self._busy = False

    async def repeat(self, seconds: float) -> None:
        """Log a line every `seconds`, for ever."""
        while True:
            await asyncio.sleep(seconds)
            line = self.line()
            if line is not None:
                _log.info("%s", line)

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
