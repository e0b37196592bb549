"""Drafts of a draft model: it always has some, and makes them for many sequences at once.

The drafts of other proposers cost next to nothing to make. Those of a draft model take a step of
its own each, before the step that verifies them, so that all rows have to wait for it.
"""

from collections import abc

from tpdet.control.row_messages import RowKey
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative import planner
from tpdet.speculative.proposers.proposer import DRAFT_MODEL, BatchProposer
from tpdet.speculative.step_time import StepTimes

_MATCH_LENGTH = 16  # for a start; how often it is right is learned of all sequences
_SHARE_OF_STEP, _SHARE_OF_ROW = 0.25, 0.01
"""The share of a step that a draft model's step takes, and each row more, until that is measured
(an H200, 0.6B for 8B: 0.26 for one row, 0.42 for 16)."""
_LEAST_STEPS = 16  # that bear what the first drafts of a sequence take


class DraftModelProposer:
    """A draft model, what its drafts cost, and what they must gain; one for all sequences.

    seconds: of all its calls. failed: it is asked no more.
    """

    name = DRAFT_MODEL
    is_spent = False

    def __init__(
        self,
        model: BatchProposer,
        times: StepTimes,
        switch_off: abc.Callable[[str], None],
        clock: abc.Callable[[], float],
    ) -> None:
        """times: of the steps that verify. switch_off: is called, with the reason, if it fails."""
        self._model, self._times = model, times
        self._switch_off, self._clock = switch_off, clock
        self.seconds = 0.0
        self.failed = False
        self._ended = 0.0  # `seconds`, when the last step ended
        self._drafted = False  # when drafts were last chosen

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """A fixed length: it always has something."""
        return _MATCH_LENGTH

    def propose(self, most: int) -> abc.Sequence[int]:
        """Nothing for one sequence alone (`draft`)."""
        return ()

    def end_step(self) -> float:
        """Seconds that the model took between the last two ends of steps."""
        seconds, self._ended = self.seconds - self._ended, self.seconds
        return seconds

    def forget(self, key: RowKey) -> None:
        """Let go of what the model keeps for a sequence."""
        self._model.forget(key)

    def cost(self, sequence: Sequence, rows: int) -> planner.DraftCost:
        """What drafts for a sequence take, one of so many rows that await them together.

        A step bears as much of a sequence's first drafts as if there were as many steps as it has
        made tokens, or has left.
        """
        assumed = (_SHARE_OF_STEP + _SHARE_OF_ROW * rows) * self._times.seconds(rows, False)
        times = self._model.times
        each = times.seconds(rows) or assumed
        made = max(len(sequence.tokens) - sequence.prompt_length, _LEAST_STEPS)
        left = max(sequence.full_length - len(sequence.tokens), 1)
        first = max(times.first_seconds(rows) - each, 0.0)
        entry = times.entry_seconds if self._model.lags(sequence) else 0.0
        return planner.DraftCost(each, first, entry / min(made, left))

    def least_gain(self, rows: int) -> float:
        """What a step with its drafts must gain, where it may capture graphs for them."""
        if not self._model.captures(rows):
            return 1.0
        return planner.CAPTURE_GAIN if self._drafted else planner.CAPTURE_GAIN_TO_BEGIN

    def least_gain_to_try(self, rows: int) -> float:
        """What a step with its drafts would have to gain for a trial of them."""
        return planner.CAPTURE_GAIN_TO_TRY if self._model.captures(rows) else planner.GAIN_TO_TRY

    def draft(self, lengths: planner.Lengths) -> dict[RowKey, abc.Sequence[int]]:
        """The drafts that were chosen of it, by sequence, made for all together."""
        drafts = self.ask(
            [
                (it.sequence, min(count, SHORT_TOKENS - 1))
                for it, count in lengths
                if it.is_of_model and not it.pending and count
            ]
        )
        self._drafted = bool(drafts)
        return drafts

    def ask(self, requests: list[tuple[Sequence, int]]) -> dict[RowKey, abc.Sequence[int]]:
        """At most so many drafts for each sequence; empty ones if the model fails."""
        if not requests:
            return {}
        began = self._clock()
        drafts: abc.Sequence[abc.Sequence[int]] = [()] * len(requests)
        try:
            drafts = self._model.draft(requests)
        except Exception as error:
            self.failed = True
            self._switch_off(f"raised {type(error).__name__}: {error}")
        self.seconds += self._clock() - began
        return {it.key: ids for (it, _), ids in zip(requests, drafts, strict=True)}
