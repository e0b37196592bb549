"""What steps cost: how much longer a step takes with more positions, or awaited.

A step is awaited if the results of the step before were read before it was launched. Times are kept
by positions, up to a power of two; a median of few, so that one slow step counts little.
"""

import statistics
from collections import deque

POSITION = 0.003
"""What one position adds to a step, as a share, until that is measured (an H200, 8B: 0.0028)."""
_AWAITED = 0.15  # what waiting adds where steps can be launched ahead (0.13 to 0.18)
_TIMES, _ENOUGH = 9, 3  # that are kept of a cell, and that tell its time
_OLD = 512  # steps after which a cell's times are forgotten
_SLOW, _SLOW_IN_A_ROW = 4.0, 8  # so many times the usual is an accident, unless it lasts

Cell = tuple[int, bool]
"""Positions of a step as the power of two that holds them, and whether it is awaited."""


class Pace:
    """Times of steps in which sequences decode, with drafts or without."""

    def __init__(self, runs_ahead: bool) -> None:
        """runs_ahead: whether steps are launched ahead where nothing is awaited."""
        self.runs_ahead = runs_ahead
        self._times: dict[Cell, deque[float]] = {}
        self._known: dict[Cell, float] = {}  # medians, where there are times enough
        self._latest: dict[Cell, int] = {}  # the step of a cell's latest time
        self._estimates: dict[Cell, float] = {}  # until the next step ends
        self._steps = 0
        self._usual: deque[float] = deque(maxlen=32)
        self._slow = 0

    def took(self, positions: int, awaited: bool, seconds: float) -> None:
        """A step took so long, from the end of the one before to its own end."""
        self._steps += 1
        if self._usual and seconds > _SLOW * statistics.median(self._usual):
            self._slow += 1
            if self._slow <= _SLOW_IN_A_ROW:
                return
        else:
            self._slow = 0
        self._usual.append(seconds)
        self._estimates.clear()
        cell = _cell(positions, awaited)
        if not self._is_fresh(cell):
            self._times[cell] = deque(maxlen=_TIMES)
            self._known.pop(cell, None)
        times = self._times[cell]
        times.append(seconds)
        self._latest[cell] = self._steps
        if len(times) >= _ENOUGH and (median := statistics.median(times)) > 0.0:
            self._known[cell] = median

    def is_measured(self, positions: int, awaited: bool) -> bool:
        """Whether the time of such steps is known."""
        cell = _cell(positions, awaited)
        return cell in self._known and self._is_fresh(cell)

    def time(self, positions: int, awaited: bool) -> float:
        """The time of a step beside that of others: measured, or estimated from the most alike."""
        cell = _cell(positions, awaited)
        if cell not in self._estimates:
            self._estimates[cell] = self._estimate(cell)
        return self._estimates[cell]

    def _estimate(self, cell: Cell) -> float:
        alike = [known for known in self._known if self._is_fresh(known)]
        if not alike:
            return self._assumed(cell)
        near = min(alike, key=lambda it: (abs(it[0] - cell[0]) + (it[1] != cell[1]), it))
        return self._known[near] * self._assumed(cell) / self._assumed(near)

    def _assumed(self, cell: Cell) -> float:
        waits = _AWAITED if self.runs_ahead and cell[1] else 0.0
        return (1.0 + waits) * (1.0 + POSITION * (1 << cell[0]))

    def _is_fresh(self, cell: Cell) -> bool:
        """Whether a cell has a time that is not old."""
        return cell in self._latest and self._steps - self._latest[cell] <= _OLD


def _cell(positions: int, awaited: bool) -> Cell:
    return (positions - 1).bit_length(), awaited
