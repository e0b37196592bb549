"""Steps that are planned and not committed, and the sequences that ended meanwhile."""

from collections import abc
from dataclasses import dataclass, field

from tpdet.control.plan import StepPlan
from tpdet.control.row_messages import RowKey, ScoringRow
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.scheduler.rows import row_params, scoring_row
from tpdet.scheduler.sequence import Sequence, settle_row

Wanted = tuple[list[RowParams | None], list[ScoringRow | None]]
"""For each row of a plan, in order: what to sample after it, and what to score in it."""


@dataclass(frozen=True)
class PendingStep:
    """One planned step: `sequences[i]` is computed by row i, which ends before position `ends[i]`.

    `samples[i]` says how many tokens it samples, `logits[i]` of how many positions it has logits.
    `drafted` has the number of drafts of each row that carries some. Where a row follows unverified
    drafts, its end is the first that is possible until `PendingSteps.settle`; `void` are rows
    without one, whose results stand for nothing.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    ends: list[int]
    samples: list[int]
    logits: list[int]
    scoring: dict[RowKey, ScoringRow]
    drafted: dict[RowKey, int]
    void: set[RowKey] = field(default_factory=set)

    def wanted(self) -> Wanted:
        """What to sample after each row, and what to score in it, before anything is committed."""
        sampling = [
            row_params(sequence, end) if samples else None
            for sequence, end, samples in zip(self.sequences, self.ends, self.samples, strict=True)
        ]
        return sampling, [self.scoring.get(sequence.key) for sequence in self.sequences]


class PendingSteps:
    """At most two steps, oldest first.

    `finished` are sequences that ended while one of these steps still computes a row of theirs.
    They keep their pages until that step is committed, so that no other sequence gets a page which
    the step still writes.
    """

    def __init__(self) -> None:
        self.finished: list[Sequence] = []
        self._steps: list[PendingStep] = []

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, plan: StepPlan, sequences: abc.Sequence[Sequence]) -> None:
        """Add a plan whose row i computes `sequences[i]`, and count those positions as computed.

        PENDING stands for the token that a row samples, until the commit.
        """
        rows = plan.rows
        ends, samples = (rows.start + rows.count).tolist(), rows.samples.tolist()
        step = PendingStep(plan, tuple(sequences), ends, samples, rows.logits.tolist(), {}, {})
        sampled = 0
        for sequence, end, count in zip(sequences, ends, samples, strict=True):
            if sequence.scores_prompt:
                scoring = scoring_row(sequence, sequence.computed, end)
                if scoring is not None:
                    step.scoring[sequence.key] = scoring
            sequence.begin_row(end, count, sampled)
            sampled += count
            if count > 1:
                step.drafted[sequence.key] = count - 1
        self._steps.append(step)

    def has(self, sequence: Sequence) -> bool:
        """Whether a pending step computes a row of `sequence`."""
        return sequence.pending_rows > 0

    def latest(self, plan: StepPlan) -> PendingStep:
        """The step of the latest plan. Raises IntegrityError for any other plan."""
        step = self._steps[-1] if self._steps else None
        if step is None or step.plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the one that was planned last")
        return step

    def oldest(self, number: int) -> PendingStep:
        """The step that is committed next. Raises IntegrityError unless it is step `number`."""
        if not self._steps or self._steps[0].plan.step != number:
            there = f"step {self._steps[0].plan.step}" if self._steps else "none"
            raise IntegrityError(f"commit of step {number}, but {there} is pending")
        return self._steps[0]

    def commit_oldest(self) -> list[Sequence]:
        """Drop the oldest step; returns the finished sequences whose pages can be released."""
        for sequence in self._steps.pop(0).sequences:
            sequence.pending_rows -= 1
        if not self.finished:
            return []
        free = [sequence for sequence in self.finished if not self.has(sequence)]
        self.finished = [sequence for sequence in self.finished if self.has(sequence)]
        return free

    def settle(self, sequence: Sequence, tokens: int) -> None:
        """Say where a row begins that follows a row with drafts, which gave so many tokens.

        tokens: 0 where a position of that row has none that counts, so that it is computed again.
        """
        if not sequence.expected:
            return
        step = self._steps[0]
        if not tokens:
            step.void.add(sequence.key)
            sequence.expected = []
            return
        settle_row(sequence, tokens - 1, step.drafted.get(sequence.key, 0))
        step.ends[step.sequences.index(sequence)] = sequence.computed

    def refuse_any(self) -> None:
        """Raise IntegrityError while a step is pending."""
        if self._steps:
            step = self._steps[0].plan.step
            raise IntegrityError(f"step {step} is pending: commit it first")
