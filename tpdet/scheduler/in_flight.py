"""Steps in flight, and the sequences that ended while their rows were computed."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

from tpdet.control.plan import StepPlan
from tpdet.control.sampling_row import RowKey, SamplingRow, ScoringRow
from tpdet.errors import IntegrityError
from tpdet.scheduler.flight import Flight, take_off
from tpdet.scheduler.sequence import Sequence

Wanted = tuple[list[SamplingRow | None], list[ScoringRow | None]]
"""Of every row of a plan, in its order."""


class InFlight:
    """The steps that were planned and not committed, oldest first: at most two.

    `leaving` are finished sequences with a row in one of them: they keep their pages until it
    has landed, so that nobody else writes where it still does.
    """

    def __init__(self) -> None:
        self.leaving: list[Sequence] = []
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def drawn(self) -> Mapping[RowKey, int]:
        """Which of the latest step's drawn tokens is whose; empty without one."""
        return self._flights[-1].drawn if self._flights else {}

    def begin(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Put a plan whose rows are the next of `sequences` behind the others."""
        self._flights.append(take_off(plan, sequences))

    def has(self, sequence: Sequence) -> bool:
        """Whether a row of `sequence` is in flight."""
        return any(sequence.key in flight.keys for flight in self._flights)

    def wanted(self, plan: StepPlan) -> Wanted:
        """What each row of the plan that took off last is to give: to sample, then to score.

        Raises IntegrityError when it is another plan's turn.
        """
        flight = self._flights[-1] if self._flights else None
        if flight is None or flight.plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the one that took off last")
        keys = [sequence.key for sequence in flight.sequences]
        return list(map(flight.sampling.get, keys)), list(map(flight.scoring.get, keys))

    def oldest(self, step: int) -> Flight:
        """The flight that is to land next. Raises IntegrityError unless it is that of `step`."""
        if not self._flights or self._flights[0].plan.step != step:
            there = f"step {self._flights[0].plan.step}" if self._flights else "none"
            raise IntegrityError(f"commit of step {step}, but {there} is in flight")
        return self._flights[0]

    def land(self) -> list[Sequence]:
        """Take the oldest flight out; the sequences whose pages nobody writes any more."""
        del self._flights[0]
        free = [sequence for sequence in self.leaving if not self.has(sequence)]
        self.leaving = [sequence for sequence in self.leaving if self.has(sequence)]
        return free

    def refuse_any(self) -> None:
        """Raise IntegrityError while a step is in flight."""
        if self._flights:
            step = self._flights[0].plan.step
            raise IntegrityError(f"step {step} is in flight: commit it first")
