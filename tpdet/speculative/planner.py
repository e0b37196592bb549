"""Which sequences carry how many drafts: what is expected to give the most tokens a second.

A row with drafts saves the steps of those that are right. It costs what its positions add to the
step, what a draft model takes before it, and what it costs to wait for results, where no row can
follow drafts that a step still verifies. All gains by which this is decided stand in this file.
"""

from collections import abc, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.policy import OTHERS_PER_ABSENT
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.acceptance import RejectionStreak, Trial
from tpdet.speculative.proposers.proposer import BY_TOKENS, DRAFT_MODEL, DRAFTS, Proposer
from tpdet.speculative.step_time import StepTimes

LONG_ROW = 64  # drafts from which a row that is too long for a graph of drafts pays
_LENGTHS = np.array([*range(1, SHORT_TOKENS), LONG_ROW - 1, 2 * LONG_ROW - 1, 4 * LONG_ROW - 1])
"""Drafts that the row which is most likely right may carry."""
_GAIN, _GAIN_TO_BEGIN, _GAIN_UNMEASURED = 1.02, 1.08, 1.2
"""What drafts must gain if all rows wait for them: to go on, to begin, and where it is not measured
what a step takes without."""
CAPTURE_GAIN, CAPTURE_GAIN_TO_BEGIN, CAPTURE_GAIN_TO_TRY = 1.15, 1.2, 1.25
"""What a draft model must gain to go on, to begin and to be tried where the first steps of each
kind capture graphs, in both models, for 30 to 45 ms each."""
GAIN_TO_TRY = 1.12  # where they do not; beginning and going on are as for other drafts
_MOST_STEPS = 8  # steps with drafts that may follow one that is waited for, at most
_SIT_OUT = 1.1  # tokens that a row must gain if its sequence sits out the next step for it


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A row with drafts that is not verified: their proposer's name, and the length of its match.

    head: tokens that the proposer expected before the drafts, from position `first` on.
    """

    name: str
    match_length: int
    first: int
    head: abc.Sequence[int]


@dataclass(slots=True, eq=False)
class Speculation:
    """What is known of one sequence's drafts; the speculator owns it and alone writes it.

    rows: those with drafts that are pending, oldest first; first, head: of the next one. expected:
    the proposer whose drafts it waits for until its token is known. trials: drafts of proposers
    that no step verifies.
    """

    sequence: Sequence
    proposers: list[Proposer]
    rows: deque[DraftedRow] = field(default_factory=deque)
    first: int = 0
    head: abc.Sequence[int] = ()
    streaks: dict[str, RejectionStreak] = field(default_factory=dict)
    expected: str = ""
    trials: dict[str, Trial] = field(default_factory=dict)

    @property
    def guesses(self) -> bool:
        """Whether its proposers say what may follow tokens that a step still verifies."""
        return not any(proposer.name in BY_TOKENS for proposer in self.proposers)

    def streak(self, name: str) -> RejectionStreak:
        """A proposer's latest rows of the sequence."""
        return self.streaks.setdefault(name, RejectionStreak())


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds that a draft model's drafts take before the step that verifies them.

    each: a draft of the longest row, all rows together; first: what the first of them takes beside
    that. entry: what a step bears of what the first drafts of the sequence take.
    """

    each: float = 0.0
    first: float = 0.0
    entry: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A proposer with drafts for a sequence, where there is room for `room` of them.

    rate: the acceptance rate of each. pending: the sequence's last token is not known, so it would
    have to wait first; availability: the probability that there are drafts then. before: unknown
    tokens that the proposer expects in front of the drafts; missed: the acceptance rate where one
    of them is another.
    """

    speculation: Speculation
    proposer: Proposer
    match_length: int
    rate: float
    room: int
    pending: bool = False
    availability: float = 1.0
    cost: DraftCost = DraftCost()
    before: int = 0
    missed: float = 0.5

    @property
    def sequence(self) -> Sequence:
        """The sequence that is to carry the drafts."""
        return self.speculation.sequence

    @property
    def is_requested(self) -> bool:
        """Whether a client sent the drafts as its answer: they are verified in any case."""
        return self.proposer.name == DRAFTS

    @property
    def is_of_model(self) -> bool:
        """Whether they are those of a draft model, which take time before the step."""
        return self.proposer.name == DRAFT_MODEL


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step without drafts: its rows, its times, and the positions that drafts may add.

    waiting: rows that await results in any case. share: of its decoding rows that were looked at.
    """

    rows: int
    waiting: int
    budget: int
    times: StepTimes
    share: float = 1.0

    @property
    def synchronous(self) -> bool:
        """Whether the results of the step before are read first in any case."""
        others = self.rows - self.waiting
        return not self.times.runs_ahead or self.waiting * OTHERS_PER_ABSENT > others

    def seconds(self, drafts: int, synchronous: bool) -> float:
        """Seconds of the step with so many drafts."""
        return self.times.seconds(self.rows + drafts, synchronous)

    @property
    def rate(self) -> float:
        """Tokens a second without drafts."""
        return self.rows / self.seconds(0, self.synchronous)


Lengths = list[tuple[DraftCandidate, int]]
"""Each candidate with its speculation length: how many drafts it is to carry, perhaps none."""


def plan_lengths(
    candidates: abc.Sequence[DraftCandidate], step: StepCost, model_gain: float = 1.0
) -> tuple[Lengths, bool]:
    """How many drafts sequences are to carry, where the step is expected to gain by it.

    All rows wait for their results together (True) where that pays. Else the step runs ahead, and
    the likeliest few sit out the next one for their drafts, where that does. model_gain: what a
    step with a draft model's drafts must gain in any case; those are made only where all rows wait.
    """
    without_model = [it for it in candidates if not it.is_of_model]
    if len(without_model) < len(candidates):
        lengths, together = _plan(candidates, step, model_gain)
        if together:
            return lengths, True
    return _plan(without_model, step, 1.0) if without_model else ([], False)


def plan_following(candidates: abc.Sequence[DraftCandidate], step: StepCost) -> Lengths:
    """How many drafts sequences are to carry in a step that nothing waits for; empty: none pay."""
    if not candidates:
        return []
    counts, gains, seconds = _steps(candidates, step, False, 1.0)
    lengths, rate = _best(candidates, counts, (step.rows + gains) / seconds)
    gain = _GAIN if step.times.is_measured(step.rows, False) else _GAIN_UNMEASURED
    return lengths if rate > step.rows / step.seconds(0, False) * gain else []


def _plan(
    candidates: abc.Sequence[DraftCandidate], step: StepCost, least_gain: float
) -> tuple[Lengths, bool]:
    begins = not step.synchronous and any(it.pending for it in candidates)
    without, gain = step.rate, _GAIN_TO_BEGIN if begins else _GAIN
    if not step.times.is_measured(step.rows, step.synchronous):
        gain = _GAIN_UNMEASURED
    lengths, rate = _together(candidates, step, begins)
    if rate > without * max(gain, least_gain):
        return lengths, True
    if not step.synchronous:
        lengths, rate = _apart(candidates, step)
        if rate > without:
            return lengths, False
    return [], False


def _together(
    candidates: abc.Sequence[DraftCandidate], step: StepCost, begins: bool
) -> tuple[Lengths, float]:
    """The best step that all rows wait for, and its tokens a second.

    begins: a sequence's token is pending, so that the step before is waited for, too. There will be
    as much for the sequences that were not looked at, then.
    """
    if not begins:
        counts, gains, seconds = _steps(candidates, step, True, 1.0)
        return _best(candidates, counts, (step.rows + gains) / seconds)
    counts, gains, seconds = _steps(candidates, step, True, 1.0 / step.share)
    availability = sum(it.availability for it in candidates) / len(candidates)
    steps = 1.0 / max(1.0 - availability, 1.0 / _MOST_STEPS)
    tokens = step.rows + steps * (step.rows + gains)
    rates = tokens / (step.seconds(0, True) + steps * seconds)
    return _best(candidates, counts, rates)


def _apart(candidates: abc.Sequence[DraftCandidate], step: StepCost) -> tuple[Lengths, float]:
    """The best step for which the likeliest few sit out the next one, and tokens a second."""
    few = step.rows // (OTHERS_PER_ABSENT + 1)
    likely = [it for it in candidates if not it.is_of_model]  # which would wait for the step
    likely = sorted(likely, key=lambda it: it.availability * it.rate, reverse=True)[:few]
    likely = [it for it in likely if it.availability * _gain(it.rate, it.room) > _SIT_OUT]
    if not likely:
        return [], 0.0
    counts, gains, seconds = _steps(likely, step, False, 1.0)
    rates = (2 * step.rows - len(likely) + gains) / (step.seconds(0, False) + seconds)
    return _best(likely, counts, rates)


def _steps(
    candidates: abc.Sequence[DraftCandidate],
    step: StepCost,
    synchronous: bool,
    times_as_many: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps with ever more drafts: counts [steps, candidates], tokens gained and seconds [steps].

    In each all drafts are as likely right as the last one of the likeliest row, or more. The first
    has none. times_as_many: sequences as there are in `candidates`.
    """
    rates = np.array([it.rate for it in candidates])
    availability = np.array([it.availability for it in candidates])
    rooms = np.array([it.room for it in candidates])
    logs = np.log(rates)
    counts = (_LENGTHS[:, None] * (logs.max() / logs) + 1e-6).astype(int)
    counts = np.minimum(counts, rooms)
    counts[(counts >= SHORT_TOKENS) & (counts < LONG_ROW - 1)] = SHORT_TOKENS - 1
    totals = (counts.sum(axis=1) * times_as_many).astype(int)
    fits = totals <= step.budget
    counts, totals = counts[fits], totals[fits]
    accepted = availability * _gain(rates, counts)
    if any(it.before for it in candidates):
        met = rates ** np.array([it.before for it in candidates])
        missed = np.array([it.missed for it in candidates])
        accepted = met * accepted + (1.0 - met) * _gain(missed, counts)
    gains = accepted.sum(axis=1) * times_as_many
    seconds = np.array([step.seconds(total, synchronous) for total in totals.tolist()])
    if any(it.is_of_model for it in candidates):
        costs = [it.cost for it in candidates]
        seconds += (counts * np.array([it.each for it in costs])).max(axis=1)
        seconds += ((counts > 0) * np.array([it.first for it in costs])).max(axis=1)
        seconds += (counts > 0) @ np.array([it.entry for it in costs]) * times_as_many
    return counts, gains, seconds


def _gain(rate: Any, count: Any) -> Any:
    """The drafts of a row, or of rows, that are expected to be right."""
    return rate * (1.0 - rate**count) / (1.0 - rate)


def _best(
    candidates: abc.Sequence[DraftCandidate], counts: np.ndarray, rates: np.ndarray
) -> tuple[Lengths, float]:
    """The drafts of the step with the greatest rate; of equal ones the one with the fewest."""
    if not len(rates):
        return [], 0.0
    best = int(rates.argmax())
    drafts = counts[best].tolist()
    return list(zip(candidates, drafts, strict=True)), float(rates[best])
