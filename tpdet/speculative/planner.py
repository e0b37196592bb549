"""Which sequences carry how many drafts: what is expected to give the most tokens a second."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.proposal import DRAFTS, Drafter
from tpdet.speculative.step_time import Pace

OTHERS_PER_ABSENT = 10
"""Least other running sequences for each that sits out a step which is planned ahead."""
LONG_ROW = 64  # drafts from which a row that is too long for a graph of drafts pays
_LENGTHS = np.array([*range(1, SHORT_TOKENS), LONG_ROW - 1, 2 * LONG_ROW - 1, 4 * LONG_ROW - 1])
"""Drafts that the row which is most likely right may carry."""
_GAIN, _GAIN_TO_BEGIN, _GAIN_UNMEASURED = 1.02, 1.08, 1.2
"""That drafts must give if all rows wait for them: to go on, to begin, and where it is not measured
what a step takes without."""
_STAYS = 8  # steps with drafts that may follow one that is awaited for them, at most
_SIT_OUT = 1.1  # tokens that a row must gain if its sequence sits out the next step for it


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter with something for a sequence, where there is room for `most` drafts.

    chance: of each to be right. pending: the sequence's last token is not known, so it would have
    to wait first; kept: how likely there is something then. seconds: that each draft of the longest
    row takes before the step, all rows together; more: that the first one takes beside that. entry:
    seconds that a step bears of what the first drafts of the sequence take.
    """

    sequence: Sequence
    drafter: Drafter
    trust: int
    chance: float
    most: int
    pending: bool = False
    kept: float = 1.0
    seconds: float = 0.0
    more: float = 0.0
    entry: float = 0.0

    @property
    def is_told(self) -> bool:
        """Whether a client sent the drafts as its answer: they are verified in any case."""
        return self.drafter.name == DRAFTS


@dataclass(frozen=True, slots=True)
class Load:
    """A step without drafts: its rows, and the positions that drafts may add.

    always: rows that await results in any case. share: of its decoding rows that were looked at.
    least: what a step with drafts must gain in any case.
    """

    rows: int
    always: int
    room: int
    pace: Pace
    share: float = 1.0
    least: float = 1.0

    @property
    def awaits(self) -> bool:
        """Whether the step is awaited in any case."""
        others = self.rows - self.always
        return not self.pace.runs_ahead or self.always * OTHERS_PER_ABSENT > others

    @property
    def rate(self) -> float:
        """Tokens by its time."""
        return self.rows / self.pace.time(self.rows, self.awaits)


def choose(found: Rows[Found], load: Load) -> tuple[list[tuple[Found, int]], bool]:
    """How many drafts sequences are to carry, where the step is expected to gain by it.

    All rows wait for their results together (True) where that pays. Else the step runs ahead, and
    the likeliest few sit out the next one for their drafts, where that does.
    """
    begins = not load.awaits and any(it.pending for it in found)
    without, gain = load.rate, _GAIN_TO_BEGIN if begins else _GAIN
    if not load.pace.is_measured(load.rows, load.awaits):
        gain = _GAIN_UNMEASURED
    counts, rate = _together(found, load, begins)
    if rate > without * max(gain, load.least):
        return counts, True
    if not load.awaits:
        counts, rate = _apart(found, load)
        if rate > without:
            return counts, False
    return [], False


def _together(
    found: Rows[Found], load: Load, begins: bool
) -> tuple[list[tuple[Found, int]], float]:
    """The best step that all rows wait for, and its tokens by time.

    begins: a sequence's token is pending, so that the step before is awaited, too. There will be as
    much for the sequences that were not looked at, then.
    """
    if not begins:
        counts, gains, times = _steps(found, load, True, 1.0)
        return _best(found, counts, (load.rows + gains) / times)
    counts, gains, times = _steps(found, load, True, 1.0 / load.share)
    kept = sum(it.kept for it in found) / len(found)
    steps = 1.0 / max(1.0 - kept, 1.0 / _STAYS)
    tokens = load.rows + steps * (load.rows + gains)
    rates = tokens / (load.pace.time(load.rows, True) + steps * times)
    return _best(found, counts, rates)


def _apart(found: Rows[Found], load: Load) -> tuple[list[tuple[Found, int]], float]:
    """The best step for which the likeliest few sit out the next one, and tokens by time."""
    few = load.rows // (OTHERS_PER_ABSENT + 1)
    likely = [it for it in found if not it.seconds]  # a draft model would wait for the step
    likely = sorted(likely, key=lambda it: it.kept * it.chance, reverse=True)[:few]
    likely = [it for it in likely if it.kept * _gain(it.chance, it.most) > _SIT_OUT]
    if not likely:
        return [], 0.0
    rows, pace = load.rows, load.pace
    counts, gains, times = _steps(likely, load, False, 1.0)
    sit_out = len(likely)
    rates = (2 * rows - sit_out + gains) / (pace.time(rows, False) + times)
    return _best(likely, counts, rates)


def _steps(
    found: Rows[Found], load: Load, awaited: bool, times_as_many: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps with ever more drafts: counts [steps, found], tokens gained and times [steps].

    In each all drafts are as likely right as the last one of the likeliest row, or more. The first
    has none. times_as_many: sequences as there are in `found`.
    """
    chances = np.array([each.chance for each in found])
    kept = np.array([each.kept for each in found])
    most = np.array([each.most for each in found])
    logs = np.log(chances)
    counts = (_LENGTHS[:, None] * (logs.max() / logs) + 1e-6).astype(int)
    counts = np.minimum(counts, most)
    counts[(counts >= SHORT_TOKENS) & (counts < LONG_ROW - 1)] = SHORT_TOKENS - 1
    totals = (counts.sum(axis=1) * times_as_many).astype(int)
    fits = totals <= load.room
    counts, totals = counts[fits], totals[fits]
    gains = (kept * chances * (1.0 - chances**counts) / (1.0 - chances)).sum(axis=1) * times_as_many
    times = np.array([load.pace.time(load.rows + total, awaited) for total in totals.tolist()])
    seconds = [each.seconds for each in found]
    if any(seconds):
        times += (counts * np.array(seconds)).max(axis=1)
        times += ((counts > 0) * np.array([each.more for each in found])).max(axis=1)
        times += (counts > 0) @ np.array([each.entry for each in found]) * times_as_many
    return counts, gains, times


def _gain(chance: float, count: int) -> float:
    """The drafts of a row that are expected to be right."""
    return chance * (1.0 - chance**count) / (1.0 - chance)


def _best(
    found: Rows[Found], counts: np.ndarray, rates: np.ndarray
) -> tuple[list[tuple[Found, int]], float]:
    """The drafts of the step with the greatest rate; of equal ones the one with the fewest."""
    if not len(rates):
        return [], 0.0
    best = int(rates.argmax())
    drafts = counts[best].tolist()
    return list(zip(found, drafts, strict=True)), float(rates[best])
