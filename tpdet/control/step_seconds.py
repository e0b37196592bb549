"""How long a step with prompts takes, as a table of its rows and two rates of attention."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steps on a GPU. No clock is read for it: equal starts have equal ones.

    rows: those that graphs are captured for, ascending; seconds: of each, without attention. key:
    of a key that a decoding row reads; pair: of a key that a prompt's token reads; all layers.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    key: float
    pair: float

    def of(self, rows: int, keys: float, pairs: float) -> float:
        """Seconds of a step whose decoding rows read so many keys and its prompts so many pairs.

        The step is padded up to a graph's rows; more than the largest take their share more.
        """
        graph = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        share = max(1.0, rows / self.rows[graph])
        return share * self.seconds[graph] + self.key * keys + self.pair * pairs
