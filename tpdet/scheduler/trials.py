"""Trials: drafts that are not verified, only compared with the tokens that come.

So a drafter that is never right costs no step, and none of the graphs of steps with drafts.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tpdet.control.sampling_row import RowKey
from tpdet.drafters.chances import Chances

SHARE = 0.01
"""Of the time of all steps that trials of a draft model may take."""
_CREDIT, _MOST_CREDIT = 1.0, 1.5  # steps whose time there is at first, and may be saved up
_PER_RIGHT = 1.0  # steps of credit that a right draft gives back: it would have saved one


@dataclass(frozen=True, slots=True)
class _Trial:
    name: str
    trust: int
    first: int  # the place of its first draft
    drafts: Rows[int]


class Trials:
    """Of each sequence one at a time.

    credit: steps in whose time those may be made that take any.
    """

    def __init__(self) -> None:
        self.credit = _CREDIT
        self._trials: dict[RowKey, _Trial] = {}

    def step(self) -> None:
        """A step has ended."""
        self._earn(SHARE)

    def runs(self, key: RowKey) -> bool:
        """Whether a sequence has one."""
        return key in self._trials

    def begin(self, key: RowKey, name: str, trust: int, first: int, drafts: Rows[int]) -> None:
        """A drafter says what stands at `first` and behind."""
        if drafts:
            self._trials[key] = _Trial(name, trust, first, drafts)

    def compare(self, key: RowKey, tokens: Rows[int], end: int, chances: Chances) -> str:
        """A sequence has tokens[:end]: end its trial where they decide it; whose it was, or ''."""
        trial = self._trials.get(key)
        if trial is None:
            return ""
        known = tokens[trial.first : min(end, trial.first + len(trial.drafts))]
        pairs = enumerate(zip(known, trial.drafts, strict=False))
        right = next((i for i, (mine, draft) in pairs if mine != draft), len(known))
        if right < len(known) or right == len(trial.drafts):
            del self._trials[key]
            self._earn(_PER_RIGHT * right)
            chances.learn(trial.name, trial.trust, right, len(trial.drafts))
            return trial.name
        return ""

    def _earn(self, steps: float) -> None:
        self.credit = min(self.credit + steps, _MOST_CREDIT)

    def forget(self, key: RowKey) -> None:
        """A sequence has ended."""
        self._trials.pop(key, None)
