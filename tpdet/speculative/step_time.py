"""How long steps take: with more positions, or launched only after the results of the one before.

Times are kept by positions, up to a power of two; a median of few, so that one slow step counts
little. A step is synchronous if the results of the step before were read before it was launched.
"""

import statistics
from collections import deque

POSITION = 0.003
"""What one position adds to a step, as a share, until that is measured (an H200, 8B: 0.0028)."""
_SYNCHRONOUS = 0.15  # what waiting adds where steps can be launched ahead (0.13 to 0.18)
_TIMES, _ENOUGH = 9, 3  # that are kept of a kind of step, and that tell its time
_OLD = 512  # steps after which the times of a kind are forgotten
_SLOW, _SLOW_IN_A_ROW = 4.0, 8  # so many times the usual is an accident, unless it lasts

StepKind = tuple[int, bool]
"""Positions of a step as the power of two that holds them, and whether it is synchronous."""


class StepTimes:
    """Seconds of steps in which sequences decode, with drafts or without."""

    def __init__(self, runs_ahead: bool) -> None:
        """runs_ahead: whether steps are launched ahead where nothing is waited for."""
        self.runs_ahead = runs_ahead
        self._times: dict[StepKind, deque[float]] = {}
        self._medians: dict[StepKind, float] = {}  # where there are times enough
        self._latest: dict[StepKind, int] = {}  # the step of a kind's latest time
        self._estimates: dict[StepKind, float] = {}  # until the next step ends
        self._steps = 0
        self._usual: deque[float] = deque(maxlen=32)
        self._slow = 0

    def add(self, positions: int, synchronous: bool, seconds: float) -> None:
        """Learn of a step that took so long, from the end of the one before to its own end."""
        self._steps += 1
        if self._usual and seconds > _SLOW * statistics.median(self._usual):
            self._slow += 1
            if self._slow <= _SLOW_IN_A_ROW:
                return
        else:
            self._slow = 0
        self._usual.append(seconds)
        self._estimates.clear()
        kind = _kind(positions, synchronous)
        if not self._is_fresh(kind):
            self._times[kind] = deque(maxlen=_TIMES)
            self._medians.pop(kind, None)
        times = self._times[kind]
        times.append(seconds)
        self._latest[kind] = self._steps
        if len(times) >= _ENOUGH and (median := statistics.median(times)) > 0.0:
            self._medians[kind] = median

    def is_measured(self, positions: int, synchronous: bool) -> bool:
        """Whether the time of such steps is known."""
        kind = _kind(positions, synchronous)
        return kind in self._medians and self._is_fresh(kind)

    def seconds(self, positions: int, synchronous: bool) -> float:
        """Seconds of a step: measured, or estimated from the steps that are most alike."""
        kind = _kind(positions, synchronous)
        if kind not in self._estimates:
            self._estimates[kind] = self._estimate(kind)
        return self._estimates[kind]

    def _estimate(self, kind: StepKind) -> float:
        alike = [known for known in self._medians if self._is_fresh(known)]
        if not alike:
            return self._assumed(kind)
        near = min(alike, key=lambda it: (abs(it[0] - kind[0]) + (it[1] != kind[1]), it))
        return self._medians[near] * self._assumed(kind) / self._assumed(near)

    def _assumed(self, kind: StepKind) -> float:
        waiting = _SYNCHRONOUS if self.runs_ahead and kind[1] else 0.0
        return (1.0 + waiting) * (1.0 + POSITION * (1 << kind[0]))

    def _is_fresh(self, kind: StepKind) -> bool:
        """Whether a kind of step has a time that is not old."""
        return kind in self._latest and self._steps - self._latest[kind] <= _OLD


def _kind(positions: int, synchronous: bool) -> StepKind:
    return (positions - 1).bit_length(), synchronous
