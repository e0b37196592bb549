"""Counters of a server's HTTP processes, in memory that they share.

Each process writes its own row and reads all of them, so any of them can tell the server's sums. A
row is made of float64, one for each number of FIELDS; a histogram has one for each bucket.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence

from tpdet.requests.body.problems import CODES

# Seconds, as vLLM has them, so that its dashboards' quantiles keep their resolution.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN_BUCKETS,
    "inter_token_seconds": INTER_TOKEN_BUCKETS,
    "request_seconds": REQUEST_BUCKETS,
    "step_seconds": FIRST_TOKEN_BUCKETS,
}
LABELS = {
    "requests": ("completed", "aborted", "failed"),
    "rejected": CODES,
    "finished": ("stop", "length", "abort"),
    "answer_cache": ("hit", "miss", "bypass"),
}
TOTALS = ("prompt_tokens", "generation_tokens")
OTHERS = (
    "pending", "connections", "batch_swing", "batch_swing_alarms", "receipts", "receipts_failed",
    "answer_cache_bytes",
)  # fmt: skip
"""`pending` are requests sent that the engine has not counted."""

FIELDS = (
    *TOTALS,
    *OTHERS,
    *(f"{name} {label}" for name, labels in LABELS.items() for label in labels),
    *(f"{name} {i}" for name, ends in HISTOGRAMS.items() for i in range(len(ends) + 2)),
)
"""A histogram has a count for each bucket, one past the last, and the sum in seconds."""

_PLACE = {field: place for place, field in enumerate(FIELDS)}
_NUMBER_BYTES = 8


def new_tallies(processes: int) -> int:
    """A descriptor of zeroed memory for so many processes; theirs by inheritance alone."""
    descriptor = os.memfd_create("tpdet-tallies")
    os.ftruncate(descriptor, processes * len(FIELDS) * _NUMBER_BYTES)
    return descriptor


class Times:
    """A histogram of seconds in this process's row."""

    def __init__(self, row: "memoryview[float]", name: str) -> None:
        self._row, self._ends = row, HISTOGRAMS[name]
        self._first = _PLACE[f"{name} 0"]
        self._sum = self._first + len(self._ends) + 1

    def add(self, seconds: float) -> None:
        """Count one time."""
        self._row[self._first + bisect_left(self._ends, seconds)] += 1.0
        self._row[self._sum] += seconds


class SharedTally:
    """One process's row, and the sums of all."""

    def __init__(self, descriptor: int, index: int = 0) -> None:
        memory = memoryview(mmap.mmap(descriptor, 0)).cast("B")
        rows = memory.cast("d")
        self._rows = [rows[i : i + len(FIELDS)] for i in range(0, len(rows), len(FIELDS))]
        self._mine = self._rows[index]

    @classmethod
    def alone(cls) -> "SharedTally":
        """The tally of a single process."""
        descriptor = new_tallies(1)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a number of this process's. `name` is one of FIELDS."""
        self._mine[_PLACE[name]] += amount

    def set(self, name: str, value: float) -> None:
        """Put a number in the place of this process's."""
        self._mine[_PLACE[name]] = value

    def times(self, name: str) -> Times:
        """The histogram `name`, to add to."""
        return Times(self._mine, name)

    def total(self, name: str) -> float:
        """The sum over all processes."""
        place = _PLACE[name]
        return float(sum(row[place] for row in self._rows))

    def ahead(self, name: str) -> bool:
        """Whether this process has more than another one."""
        place = _PLACE[name]
        return self._mine[place] > min(row[place] for row in self._rows)

    def histogram(self, name: str) -> tuple[list[tuple[float, float]], float]:
        """(bucket's end, times up to it) in order, the last end infinity; and the sum."""
        ends: Sequence[float] = (*HISTOGRAMS[name], float("inf"))
        found, so_far = [], 0.0
        for place, end in enumerate(ends):
            so_far += self.total(f"{name} {place}")
            found.append((end, so_far))
        return found, self.total(f"{name} {len(ends)}")
