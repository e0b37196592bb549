"""Compares the times of strict decode steps with what they were at start.

Times are kept by cell, because only steps of similar rows and context compare: a cell has rows and
pages a row up to a power of four. Only steps that decode and do nothing else count, and only in
calibrated cells. A cell is judged by the median of its last `WINDOW` steps, so that one slow step
is no slowdown. A step that is smaller than its cell is faster: such an error favours strict mode.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable

from tpdet.control.plan import PlanRows, StepPlan
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.observers import StepObserver

Cell = tuple[int, int]
"""Rows and pages a row, at most."""

ROWS = (1, 4, 16, 64, 256)
PAGES = (1, 4, 16)
WINDOW = 32

_log = logging.getLogger("tpdet.engine")


class SlowdownWatch(StepObserver):
    """Times the engine's steps. `max_slowdown`: share of the calibrated speed that may be lost.

    clock: seconds, from anywhere.
    """

    def __init__(self, max_slowdown: float, clock: Callable[[], float]) -> None:
        self.max_slowdown = max_slowdown
        self.ratio: float | None = None
        self.slow: str | None = None
        self._clock = clock
        self._began = self._ended = 0.0
        self._sample: tuple[int, list[float]] | None = None
        self._calibrated: dict[Cell, float] = {}
        self._last: dict[Cell, deque[float]] = {}

    def begin(self, pending: bool) -> None:
        """Note when the step began: a pending one did when the step before it ended."""
        self._began = self._ended if pending else self._clock()

    def end(self, plan: StepPlan, synchronous: bool) -> None:
        """Sample the step's time, or judge it."""
        self._ended = self._clock()
        seconds = self._ended - self._began
        if not _decodes(plan.rows) or plan.approximate:
            return
        if self._sample is not None:
            rows, times = self._sample
            if len(plan.rows) == rows:
                times.append(seconds)
            return
        cell = self._cell(plan.rows)
        if cell is not None:
            self._judge(cell, seconds)

    def start_sample(self, rows: int) -> None:
        """Keep the times of steps of exactly `rows` rows, and judge none meanwhile."""
        self._sample = rows, []

    def end_sample(self, cell: Cell, least: int) -> bool:
        """Calibrate `cell` by what was sampled since; False, and no more, with under `least`."""
        times = self._sample[1] if self._sample is not None else []
        self._sample = None
        if len(times) < least:
            return False
        self._calibrated[cell] = statistics.median(times)
        self._last[cell] = deque(maxlen=WINDOW)
        return True

    def alarm(self, fingerprint: str) -> None:
        """Say that answers change because of `slow`, and under which fingerprint they go on."""
        _log.error(
            "%s. As asked by on_slowdown, answers are APPROXIMATE from now on and until a restart: "
            "they are not deterministic and carry system fingerprint %s",
            self.slow,
            fingerprint,
        )

    def _cell(self, rows: PlanRows) -> Cell | None:
        """The smallest calibrated cell that a step fits in; None if it fits in none."""
        pages = -(-int((rows.start // PAGE_TOKENS + 1).sum()) // len(rows))
        fitting = (c for c in self._calibrated if c[0] >= len(rows) and c[1] >= pages)
        return min(fitting, default=None)

    def _judge(self, cell: Cell, seconds: float) -> None:
        last = self._last[cell]
        last.append(seconds)
        if len(last) < WINDOW:
            return
        now, then = statistics.median_low(last), self._calibrated[cell]
        self.ratio = now / then
        if then < (1.0 - self.max_slowdown) * now:
            self.slow = (
                f"the last {WINDOW} decode steps of up to {cell[0]} rows and {cell[1]} pages a row "
                f"took {now * 1e3:.2f} ms, {then * 1e3:.2f} ms at start: "
                f"{100 * (1 - then / now):.0f} % of the speed is lost, "
                f"{100 * self.max_slowdown:g} % may be"
            )


def _decodes(rows: PlanRows) -> bool:
    """Whether a step computes one token of each of its rows and samples the next."""
    return len(rows) > 0 and bool((rows.count == 1).all() and rows.samples.all())
