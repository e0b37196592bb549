"""Steps that are planned and not committed, and the sequences that ended meanwhile."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from tpdet.control.plan import Row, StepPlan
from tpdet.control.sampling_row import RowKey, SamplingRow, ScoringRow
from tpdet.errors import IntegrityError
from tpdet.scheduler.rows import sampling_row, scoring_row
from tpdet.scheduler.sequence import PENDING, Sequence

Wanted = tuple[list[SamplingRow | None], list[ScoringRow | None]]
"""For each row of a plan, in order: what to sample after it, and what to score in it."""


@dataclass(frozen=True)
class PendingStep:
    """One planned step: `sequences[i]` is computed by row i; the tables are keyed by sequence."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    sampling: dict[RowKey, SamplingRow]
    scoring: dict[RowKey, ScoringRow]
    sample_index: dict[RowKey, int] = field(default_factory=dict)
    """The place of a sequence's token among the tokens that the step samples, in row order."""

    keys: set[RowKey] = field(default_factory=set)

    @property
    def rows(self) -> Iterator[tuple[Row, Sequence]]:
        """The plan's rows with their sequences."""
        return zip(self.plan.rows, self.sequences, strict=True)


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

    @property
    def sample_index(self) -> Mapping[RowKey, int]:
        """`PendingStep.sample_index` of the latest step; empty without one."""
        return self._steps[-1].sample_index if self._steps else {}

    def begin(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Add a plan whose row i computes `sequences[i]`, and count those positions as computed.

        PENDING stands for the token that a row samples, until the commit.
        """
        step = PendingStep(plan, tuple(sequences), {}, {})
        sampled, sampling = step.sample_index, step.sampling
        for row, sequence in step.rows:
            key, end = sequence.key, row.start + len(row.token_ids)
            if sequence.scores_prompt:
                scoring = scoring_row(sequence, row.start, end)
                if scoring is not None:
                    step.scoring[key] = scoring
            sequence.computed = end
            if row.samples:
                sampling[key] = sampling_row(sequence, end)
                sampled[key] = len(sampled)
                sequence.tokens.append(PENDING)
        step.keys.update(sequence.key for sequence in sequences)
        self._steps.append(step)

    def has(self, sequence: Sequence) -> bool:
        """Whether a pending step computes a row of `sequence`."""
        return any(sequence.key in step.keys for step in self._steps)

    def wanted(self, plan: StepPlan) -> Wanted:
        """What to sample and what to score after each row of the latest plan.

        Raises IntegrityError for any other plan.
        """
        step = self._steps[-1] if self._steps else None
        if step is None or step.plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the one that was planned last")
        keys = [sequence.key for sequence in step.sequences]
        return list(map(step.sampling.get, keys)), list(map(step.scoring.get, keys))

    def oldest(self, number: int) -> PendingStep:
        """The step that is committed next. Raises IntegrityError unless it is step `number`."""
        if not self._steps or self._steps[0].plan.step != number:
            there = f"step {self._steps[0].plan.step}" if self._steps else "none"
            raise IntegrityError(f"commit of step {number}, but {there} is pending")
        return self._steps[0]

    def commit_oldest(self) -> list[Sequence]:
        """Drop the oldest step; returns the finished sequences whose pages can be released."""
        del self._steps[0]
        free = [sequence for sequence in self.finished if not self.has(sequence)]
        self.finished = [sequence for sequence in self.finished if self.has(sequence)]
        return free

    def refuse_any(self) -> None:
        """Raise IntegrityError while a step is pending."""
        if self._steps:
            step = self._steps[0].plan.step
            raise IntegrityError(f"step {step} is pending: commit it first")
