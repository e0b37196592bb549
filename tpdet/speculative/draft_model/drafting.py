"""A draft model's part in drafting: trials first, then drafts, where they gain what they cost.

The drafts of other drafters cost next to nothing to make. Those of a draft model take a step of its
own each, before the step that verifies them, so that all rows have to wait for it.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Protocol

from tpdet.control.row_messages import RowKey
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.sequence import PENDING, Sequence
from tpdet.speculative.acceptance import Chances
from tpdet.speculative.drafts import room_for_drafts
from tpdet.speculative.planner import Found, Load, choose
from tpdet.speculative.proposal import DRAFT_MODEL, Drafter
from tpdet.speculative.step_time import Pace
from tpdet.speculative.trials import SEQUENCES, Trials

_GAIN, _GAIN_TO_BEGIN, _GAIN_TO_TRY = 1.15, 1.2, 1.25
"""That its drafts must give to go on, to begin and to be tried where the first steps of each kind
capture graphs, in both models, for 30 to 45 ms each."""
_GAIN_TO_TRY_AT_ONCE = 1.12  # where they do not; beginning and going on are as for other drafts
_SHARE_OF_STEP, _SHARE_OF_ROW = 0.25, 0.01
"""Of a step that a draft model's step takes, and each row more, until that is measured (an H200,
0.6B for 8B: 0.26 for one row, 0.42 for 16)."""
_LEAST_STEPS = 16  # that bear what the first drafts of a sequence take


class Model(Protocol):
    """A draft model: drafts for many sequences at once, in as many steps as the longest has."""

    def seconds(self, sequences: int) -> float:
        """Of one of its steps, in which each of so many gets a draft; 0 until it is measured."""

    def first_seconds(self, sequences: int) -> float:
        """Of the first such step of a call; 0 until it is measured."""

    def captures(self, sequences: int) -> bool:
        """Whether the first drafts of so many sequences may have to capture graphs."""

    def entry_seconds(self, sequence: Sequence) -> float:
        """What the first drafts of a sequence take beside that; 0 where it was asked just now."""

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> Rows[Rows[int]]:
        """At most so many drafts behind the known tokens of each sequence."""

    def forget(self, key: RowKey) -> None:
        """Let go of what is kept for a sequence, which may be unknown."""


class ModelDrafting:
    """Whether a draft model is tried, which of its drafts pay, and what it took to make them.

    seconds: of all its calls.
    """

    def __init__(
        self,
        model: Model,
        chances: Chances,
        pace: Pace,
        switch_off: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """chances, pace: of all drafters. switch_off: is called, with the reason, if it fails."""
        self._model, self._chances, self._pace = model, chances, pace
        self._switch_off, self._clock = switch_off, clock
        self._trials = Trials()
        self.seconds = 0.0
        self._ended = 0.0  # `seconds`, when the last step ended
        self._failed = False
        self._drafted = False  # when drafts were last chosen

    @property
    def is_proven(self) -> bool:
        """Whether steps may verify its drafts: it was right in trials."""
        return self._chances.is_proven(DRAFT_MODEL)

    def end_step(self) -> float:
        """A step has ended; the seconds that the model took since the one before did."""
        took, self._ended = self.seconds - self._ended, self.seconds
        self._trials.step()
        return took

    def forget(self, key: RowKey) -> None:
        """A sequence has ended."""
        self._trials.forget(key)
        self._model.forget(key)

    def offer(self, sequence: Sequence, drafter: Drafter, trust: int, rows: int) -> Found:
        """Its drafts for a sequence: it always has some, and they take time.

        It is asked in every step that sequences await together, and in no other. A step bears as
        much of a sequence's first drafts as if there were as many steps as it has made tokens, or
        has left.
        """
        assumed = (_SHARE_OF_STEP + _SHARE_OF_ROW * rows) * self._pace.time(rows, False)
        seconds = self._model.seconds(rows) or assumed
        made = max(len(sequence.tokens) - sequence.prompt_length, _LEAST_STEPS)
        left = max(sequence.full_length - len(sequence.tokens), 1)
        return Found(
            sequence,
            drafter,
            trust,
            self._chances.of(DRAFT_MODEL, trust),
            room_for_drafts(sequence),
            sequence.tokens[-1] == PENDING,
            seconds=seconds,
            more=max(self._model.first_seconds(rows) - seconds, 0.0),
            entry=self._model.entry_seconds(sequence) / min(made, left),
        )

    def choose(self, found: Rows[Found], load: Load) -> tuple[list[tuple[Found, int]], bool]:
        """As `choose`. A step that may capture graphs for the model's drafts must gain more."""
        others = [it for it in found if not it.seconds]
        if len(others) < len(found):
            least = 1.0
            if self._model.captures(load.rows):
                least = _GAIN if self._drafted else _GAIN_TO_BEGIN
            taken, together = choose(found, replace(load, least=least))
            if together:
                return taken, True
        return choose(others, load) if others else ([], False)

    def draft(self, taken: Rows[tuple[Found, int]]) -> dict[RowKey, Rows[int]]:
        """The drafts that were chosen, by sequence; it makes them for all together."""
        drafts = self._ask(taken)
        self._drafted = bool(drafts)
        return drafts

    def may_try(self) -> bool:
        """Whether it is to be tried, by what the trials so far have shown."""
        for trial, right in self._trials.ended():
            self._chances.learn(DRAFT_MODEL, trial.trust, right, len(trial.drafts))
        return self._trials.has_time and not self.is_proven

    def try_out(self, looked: Rows[Sequence], load: Load) -> list[Sequence]:
        """Compare tokens of a model that is not proven with those that come.

        It says one for few of the sequences that wait for nothing else, while there is time for
        that, and only where its drafts would pay if they were as often right as is assumed.
        Returns the sequences that are to wait, so that it can be tried then.
        """
        offers = [
            self.offer(sequence, drafter, drafter.look((), 0), load.rows)
            for sequence in looked
            for drafter in sequence.drafters
            if drafter.name == DRAFT_MODEL and not self._failed
            if not sequence.waits and not sequence.drafted and not self._trials.has(sequence)
        ]
        trusted = [(it, self._chances.assumed(it.trust)) for it in offers]
        hoped = [replace(it, pending=True, chance=chance) for it, chance in trusted]
        least = _GAIN_TO_TRY if self._model.captures(load.rows) else _GAIN_TO_TRY_AT_ONCE
        if not hoped or not choose(hoped, replace(load, least=least))[1]:
            self._trials.awaited = False
            return []
        known = [it for it in offers if not it.pending][:SEQUENCES]
        if known:
            self._trials.awaited = False
            self._begin_trials(known, load)
        if not self._trials.has_time:
            return []
        self._trials.awaited = True
        step, awaited = (self._pace.time(load.rows, awaits) for awaits in (load.awaits, True))
        self._trials.spend((awaited - step) / step)
        return [it.sequence for it in offers[:SEQUENCES]]

    def _begin_trials(self, offers: Rows[Found], load: Load) -> None:
        """Ask for a token of each sequence."""
        before = self.seconds
        drafts = self._ask([(it, 1) for it in offers])
        self._trials.spend((self.seconds - before) / self._pace.time(load.rows, load.awaits))
        for it in offers:
            self._trials.begin(it.sequence, it.trust, drafts.get(it.sequence.key, ()))

    def _ask(self, taken: Rows[tuple[Found, int]]) -> dict[RowKey, Rows[int]]:
        wanted = [
            (it.sequence, min(count, SHORT_TOKENS - 1))
            for it, count in taken
            if it.drafter.name == DRAFT_MODEL and not it.pending and count
        ]
        if not wanted:
            return {}
        began = self._clock()
        drafts: Rows[Rows[int]] = [()] * len(wanted)
        try:
            drafts = self._model.draft(wanted)
        except Exception as error:
            self._failed = True
            self._switch_off(f"raised {type(error).__name__}: {error}")
        self.seconds += self._clock() - began
        return {it.key: ids for (it, _), ids in zip(wanted, drafts, strict=True)}
