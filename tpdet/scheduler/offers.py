"""Which sequences carry how many drafts: what is expected to give the most tokens a second."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpdet.drafters.chances import MOST
from tpdet.drafters.drafter import DRAFTS, Drafter
from tpdet.drafters.pace import Pace
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.sequence import Sequence

OTHERS_PER_ABSENT = 10
"""Least other running sequences for each that sits out a step which is planned ahead."""
LONG_ROW = 64  # drafts from which a row that is too long for a graph of drafts pays
_LENGTHS = np.array([*range(1, SHORT_TOKENS), LONG_ROW - 1, 2 * LONG_ROW - 1, 4 * LONG_ROW - 1])
"""Drafts that the row which is most likely right may carry."""
_GAIN, _GAIN_TO_BEGIN, _GAIN_UNMEASURED = 1.02, 1.05, 1.2
"""That drafts must give if all rows wait for them: to go on, to begin, and where it is not measured
what a step takes without."""
_STAYS = 8  # steps with drafts that may follow one that is awaited for them, at most
_SIT_OUT = 1.1  # tokens that a row must gain if its sequence sits out the next step for it
_CAPTURE = 0.04  # seconds of a graph's capture on an H200 (0.03 to 0.045)
_LEAST = 0.01  # of a chance
DOUBT = 0.5
"""Of a standard deviation of a chance, less than which a capture must pay."""
_LEAST_USES = 16  # steps that are to pay for a capture, at least


LacksGraph = Callable[[int, int, int, int], Hashable | None]
"""The graph that must be captured for a step of so many rows, positions, positions of its longest
row, and pages; None: none."""


class Captures:
    """What graphs of steps with drafts cost, beside what they are worth.

    A capture counts as spread over as many steps as it would have been good for so far. So what
    gains much is captured at once, and what gains little or is rare when it would have paid.
    """

    def __init__(self) -> None:
        self.lacks: LacksGraph = lambda *_: None
        self._wished: dict[Hashable, float] = {}

    def share(self, graph: Hashable | None) -> float:
        """Of its capture, in seconds, that a step has to bear."""
        if graph is None:
            return 0.0
        return _CAPTURE / max(self._wished.get(graph, 0.0), _LEAST_USES)

    def wish(self, graph: Hashable | None, steps: int) -> None:
        """A graph would have been good for so many steps more."""
        if graph is not None:
            self._wished[graph] = self._wished.get(graph, 0.0) + steps


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter with something for a sequence, where there is room for `most` drafts.

    chance: of each to be right. pending: the sequence's last token is not known, so it would have
    to wait first; kept: how likely there is something then. seconds: that each draft of the longest
    row takes before the step, all rows together. entry: seconds that a step bears of what the first
    drafts of the sequence take. proven: whether the drafter was right before. doubt:
    the standard deviation of the chance.
    """

    sequence: Sequence
    drafter: Drafter
    trust: int
    chance: float
    most: int
    pending: bool = False
    kept: float = 1.0
    seconds: float = 0.0
    entry: float = 0.0
    proven: bool = True
    doubt: float = 0.0

    def if_lucky(self, times: float) -> "Found":
        """It where the chance is greater than what was seen, by so many times the doubt."""
        chance = min(max(self.chance + times * self.doubt, _LEAST), MOST)
        return replace(self, chance=chance, entry=0.0)

    @property
    def is_told(self) -> bool:
        """Whether a client sent the drafts as its answer: they are verified in any case."""
        return self.drafter.name == DRAFTS


@dataclass(frozen=True, slots=True)
class Load:
    """A step without drafts: its rows, and the positions that drafts may add.

    always: rows that await results in any case. share: of its decoding rows that were looked at.
    pages: of its rows. since: steps since the last choice.
    """

    rows: int
    always: int
    room: int
    pace: Pace
    share: float = 1.0
    captures: Captures = field(default_factory=Captures)
    pages: int = 0
    since: int = 1

    @property
    def awaits(self) -> bool:
        """Whether the step is awaited in any case."""
        others = self.rows - self.always
        return not self.pace.runs_ahead or self.always * OTHERS_PER_ABSENT > others

    @property
    def rate(self) -> float:
        """Tokens by its time."""
        return self.rows / self.pace.time(self.rows, self.awaits)

    def graph(self, drafts: int, longest: int) -> Hashable | None:
        """The graph that a step with so many drafts lacks, of which one row has the `longest`."""
        return self.captures.lacks(self.rows, self.rows + drafts, 1 + longest, self.pages)


def choose(found: Rows[Found], load: Load) -> tuple[list[tuple[Found, int]], bool]:
    """How many drafts sequences are to carry, where the step is expected to gain by it.

    All rows wait for their results together (True) where that pays. Else the step runs ahead, and
    the likeliest few sit out the next one for their drafts, where that does.
    """
    begins = not load.awaits and any(it.pending for it in found)
    enough = load.rate * (_GAIN_TO_BEGIN if begins else _GAIN)
    if not load.pace.is_measured(load.rows, load.awaits):
        enough = load.rate * _GAIN_UNMEASURED
    drafts = _together(found, load, begins).best(load, enough)
    if drafts:
        return list(zip(found, drafts, strict=True)), True
    if not load.awaits and (likely := _likeliest(found, load)):
        drafts = _apart(likely, load).best(load, load.rate)
        return list(zip(likely, drafts, strict=False)), False
    return [], False


def would_pay(found: Rows[Found], load: Load) -> bool:
    """Whether steps with drafts were worth to begin with, if no graph had to be captured."""
    steps = _steps(found, load, True, 1.0 / load.share)
    return bool(((load.rows + steps.tokens) / steps.seconds > _GAIN_TO_BEGIN * load.rate).any())


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps with ever more drafts: counts [steps, found], their sums, and three numbers of each.

    In each all drafts are as likely right as the last one of the likeliest row, or more. tokens:
    that are expected; doubt: how many fewer there are without luck; seconds. often: of how many
    steps with drafts these are.
    """

    counts: np.ndarray
    drafts: np.ndarray
    tokens: np.ndarray
    doubt: np.ndarray
    seconds: np.ndarray
    often: float = 1.0

    def among(self, tokens: float, seconds: float, often: float = 1.0) -> "_Steps":
        """So many of each, beside other tokens that take other seconds."""
        return replace(
            self,
            tokens=tokens + often * self.tokens,
            doubt=often * self.doubt,
            seconds=seconds + often * self.seconds,
            often=often,
        )

    def best(self, load: Load, enough: float) -> list[int]:
        """The drafts of the step with the greatest rate; of equal ones that with the fewest.

        [] where that is not more than `enough`. What has to be captured must pay without luck.
        """
        if not len(self.tokens):
            return []
        rates = self.tokens / self.seconds
        first = best = int(rates.argmax())
        wanted, graphs = float(rates[first]) > _GAIN_TO_BEGIN * load.rate, {}
        while best not in graphs:
            graph = load.graph(int(self.drafts[best]), int(self.counts[best].max()))
            graphs[best] = graph
            if graph is not None:
                more = self.often * load.captures.share(graph)
                rates[best] = (self.tokens[best] - self.doubt[best]) / (self.seconds[best] + more)
            best = int(rates.argmax())
        pays = float(rates[best]) > enough
        if wanted and not (pays and best == first):
            load.captures.wish(graphs[first], load.since)
        return self.counts[best].tolist() if pays else []


def _together(found: Rows[Found], load: Load, begins: bool) -> _Steps:
    """Steps that all rows wait for.

    begins: a sequence's token is pending, so that the step before is awaited, too. There will be as
    much for the sequences that were not looked at, then.
    """
    if not begins:
        return _steps(found, load, True, 1.0).among(load.rows, 0.0)
    kept = sum(it.kept for it in found) / len(found)
    often = 1.0 / max(1.0 - kept, 1.0 / _STAYS)
    steps = _steps(found, load, True, 1.0 / load.share)
    return steps.among((1.0 + often) * load.rows, load.pace.time(load.rows, True), often)


def _likeliest(found: Rows[Found], load: Load) -> list[Found]:
    """The few that gain more by their drafts than the tokens of a step that they sit out."""
    few = load.rows // (OTHERS_PER_ABSENT + 1)
    likely = [it for it in found if not it.seconds]  # a draft model would wait for the step
    likely = sorted(likely, key=lambda it: it.kept * it.chance, reverse=True)[:few]
    return [it for it in likely if it.kept * _gain(it.chance, it.most) > _SIT_OUT]


def _apart(likely: Rows[Found], load: Load) -> _Steps:
    """Steps for which the likeliest few sit out the next one, each with that one."""
    steps = _steps(likely, load, False, 1.0)
    return steps.among(2 * load.rows - len(likely), load.pace.time(load.rows, False))


def _steps(found: Rows[Found], load: Load, awaited: bool, times_as_many: float) -> _Steps:
    """Steps with ever more drafts, and the tokens that they gain.

    times_as_many: sequences as there are in `found`.
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
    gains = (kept * _gain(chances, counts)).sum(axis=1) * times_as_many
    worst = np.maximum(chances - DOUBT * np.array([each.doubt for each in found]), _LEAST)
    least = (kept * _gain(worst, counts)).sum(axis=1) * times_as_many
    times = [load.pace.time(load.rows + total, awaited) for total in totals.tolist()]
    before = (counts * np.array([each.seconds for each in found])).max(axis=1)
    entries = (counts > 0) @ np.array([each.entry for each in found])
    seconds = np.array(times) + before + entries * times_as_many
    return _Steps(counts, totals, gains, gains - least, seconds)


def _gain(chance: Any, count: Any) -> Any:
    """The drafts of a row that are expected to be right; numbers or arrays."""
    return chance * (1.0 - chance**count) / (1.0 - chance)
