"""What steps cost: how much longer a step takes with more positions, or awaited.

A step is awaited if the results of the step before were read before it was launched. Times are kept
by positions, up to a power of two; a median of few, so that one slow step counts little.
"""

import statistics
from collections import deque

POSITION = 0.005
"""What one position more adds to a step, as a share, until that is measured (an H200: 0.003 to
0.006)."""
_AWAITED = 0.25  # what waiting adds where steps can be launched ahead, until it is measured
_LEAST_POSITION = 0.0005
_MORE = 2, 4, 8, 16  # times the rows: steps by which a position's cost is measured
_TIMES, _ENOUGH = 9, 3  # that are kept of a cell, and that tell its time
_OLD = 2048  # steps after which a cell's times are forgotten
_SLOW, _SLOW_IN_A_ROW = 4.0, 8  # so many times the usual is an accident, unless it lasts

Cell = tuple[int, bool]
"""Positions of a step, and whether it is awaited."""


class Pace:
    """Times of steps in which sequences decode, with drafts or without."""

    def __init__(self, runs_ahead: bool) -> None:
        """runs_ahead: whether steps are launched ahead where nothing is awaited."""
        self.runs_ahead = runs_ahead
        self._times: dict[Cell, deque[float]] = {}
        self._latest: dict[Cell, int] = {}  # the step of a cell's latest time
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
        cell = _cell(positions, awaited)
        if not self._is_known(cell):
            self._times[cell] = deque(maxlen=_TIMES)
        self._times[cell].append(seconds)
        self._latest[cell] = self._steps

    def ratio(self, before: Cell, after: Cell) -> float:
        """The time of one step as a multiple of another's: measured, or estimated until it is."""
        then, now = self._median(*before), self._median(*after)
        if then and now:
            return now / then
        waits = _AWAITED if self.runs_ahead and after[1] and not before[1] else 0.0
        return (1.0 + waits) * (1.0 + POSITION * (after[0] - before[0]))

    def position(self, rows: int) -> float:
        """What one position more adds to an awaited step of `rows`, as a share of it."""
        plain = self._median(rows, True)
        for more in _MORE:
            drafted = self._median(rows * more, True)
            if plain and drafted:
                share = (drafted / plain - 1.0) / (rows * more - rows)
                return min(max(share, _LEAST_POSITION), 1.0)
        return POSITION

    def _median(self, positions: int, awaited: bool) -> float:
        """The time of a cell; 0 where it is not known."""
        cell = _cell(positions, awaited)
        enough = self._is_known(cell) and len(self._times[cell]) >= _ENOUGH
        return statistics.median(self._times[cell]) if enough else 0.0

    def _is_known(self, cell: Cell) -> bool:
        """Whether a cell has a time that is not old."""
        return cell in self._latest and self._steps - self._latest[cell] <= _OLD


def _cell(positions: int, awaited: bool) -> Cell:
    return (positions - 1).bit_length(), awaited
