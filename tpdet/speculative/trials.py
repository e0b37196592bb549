"""Trials of a draft model: drafts that no step verifies, compared with the tokens that come.

A host's drafts are made while the GPU works, so they are tried in steps. A draft model's take time
of the GPU, for its prompts and its steps. So a few tokens say first whether it is ever right.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tpdet.control.row_messages import RowKey
from tpdet.scheduler.sequence import PENDING, Sequence

SEQUENCES = 4
"""That a trial asks for, at most: each computes its prompt."""
_SHARE = 0.005  # of the time of all steps that trials may take
_CREDIT, _LEAST_CREDIT, _MOST_CREDIT = 3.0, 0.2, 3.0
"""Steps whose time there is at first, that are needed to begin, and that may be saved up."""
_WRONG, _REST, _LONGEST_REST = 3, 64, 2048
"""Wrong trials in a row after which there is none for so many steps; twice as many each time."""
_PER_RIGHT = 1.0  # steps of credit that a right draft gives back: it would have saved one


@dataclass(frozen=True, slots=True)
class Trial:
    """The drafts of a sequence that were made where its token `first` was to come."""

    sequence: Sequence
    trust: int
    first: int
    drafts: Rows[int]

    @property
    def right(self) -> int | None:
        """How many were right, those before the first wrong one; None where that is not known."""
        sequence = self.sequence
        end = len(sequence.tokens) - sequence.drafted
        known = sequence.tokens[self.first : min(end, self.first + len(self.drafts))]
        for place, (token, draft) in enumerate(zip(known, self.drafts, strict=False)):
            if token == PENDING:
                return None
            if token != draft:
                return place
        return len(known) if len(known) == len(self.drafts) else None


class Trials:
    """Of each sequence one at a time, and the time that is left for them, in steps."""

    def __init__(self) -> None:
        self._credit = _CREDIT
        self._trials: dict[RowKey, Trial] = {}
        self.awaited = False  # sequences wait, so that they can be asked for
        self._wrong = self._rest = 0  # in a row, and steps that are left

    @property
    def has_time(self) -> bool:
        """Whether one may be begun: sequences wait for it, or there is time and no rest."""
        least = -_CREDIT if self.awaited else _LEAST_CREDIT
        return self._credit >= least and (self.awaited or not self._rest)

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence has one."""
        return sequence.key in self._trials

    def begin(self, sequence: Sequence, trust: int, drafts: Rows[int]) -> None:
        """What comes behind the tokens of a sequence may be these drafts."""
        if drafts:
            self._trials[sequence.key] = Trial(sequence, trust, len(sequence.tokens), drafts)

    def ended(self) -> Iterator[tuple[Trial, int]]:
        """Those whose tokens have come, once, and how many of their drafts were right."""
        for key, trial in list(self._trials.items()):
            if (right := trial.right) is not None:
                del self._trials[key]
                self._earn(_PER_RIGHT * right)
                self._wrong = 0 if right else self._wrong + 1
                if self._wrong >= _WRONG:
                    self._rest = min(_REST << min(self._wrong - _WRONG, 8), _LONGEST_REST)
                yield trial, right

    def step(self) -> None:
        """A step has ended."""
        self._earn(_SHARE)
        self._rest = max(self._rest - 1, 0)

    def spend(self, steps: float) -> None:
        """Trials took the time of so many steps."""
        self._credit -= steps

    def forget(self, key: RowKey) -> None:
        """A sequence has ended."""
        self._trials.pop(key, None)

    def _earn(self, steps: float) -> None:
        self._credit = min(self._credit + steps, _MOST_CREDIT)
