"""A step in flight: its plan, the sequences behind the rows, and what their results must answer."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from tpdet.control.plan import Row, StepPlan
from tpdet.control.sampling_row import RowKey, SamplingRow, ScoringRow
from tpdet.scheduler.sequence import PENDING, Sequence


@dataclass(frozen=True)
class Flight:
    """`sequences[i]` stands behind row i of the plan; the rest is of rows by their sequence."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    sampling: dict[RowKey, SamplingRow]
    scoring: dict[RowKey, ScoringRow]
    drawn: dict[RowKey, int] = field(default_factory=dict)
    """Which of the step's drawn tokens is a sequence's, in the order of the rows."""

    keys: set[RowKey] = field(default_factory=set)

    @property
    def rows(self) -> Iterator[tuple[Row, Sequence]]:
        """The plan's rows with their sequences."""
        return zip(self.plan.rows, self.sequences, strict=True)


def take_off(plan: StepPlan, sequences: Rows[Sequence]) -> Flight:
    """The flight of a plan whose rows are the next of `sequences`, which are moved past them.

    Where a row draws a token, PENDING stands in its place until the commit.
    """
    flight = Flight(plan, tuple(sequences), {}, {})
    drawn, every = flight.drawn, flight.sampling
    for row, sequence in flight.rows:
        key, end = sequence.key, row.start + len(row.token_ids)
        if sequence.scores_prompt:
            scoring = sequence.scoring_row(row.start, end)
            if scoring is not None:
                flight.scoring[key] = scoring
        sequence.computed = end
        if row.draws:
            every[key] = sequence.sampling_row(end)
            drawn[key] = len(drawn)
            sequence.tokens.append(PENDING)
    flight.keys.update(sequence.key for sequence in sequences)
    return flight
