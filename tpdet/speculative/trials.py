"""Trials: drafts that no step verifies, compared with the tokens that come.

A host's drafts are made while the GPU works, so a trial of them takes nothing: no row waits, and no
step has more rows. Each sequence has one before it carries drafts of a proposer that guesses. A
draft model's take time of the GPU, for its prompts and its steps, so there are few of them.
"""

from collections import abc

from tpdet.control.row_messages import RowKey
from tpdet.scheduler.sequence import PENDING
from tpdet.speculative.acceptance import AcceptanceRates, Trial
from tpdet.speculative.draft_rows import room_for_drafts
from tpdet.speculative.planner import DraftCandidate, Speculation, StepCost, plan_lengths
from tpdet.speculative.proposers.draft_model import DraftModelProposer
from tpdet.speculative.proposers.proposer import DRAFT_MODEL

HOST_DRAFTS, _CHOSEN_BY = 2, 1
"""Drafts of a host's trial, all of which must be right. The first of them say whether a sequence is
one on which a proposer is right at all, so rates learn of those behind them only."""
_SEQUENCES = 4  # that a trial asks for, at most: each computes its prompt
_SHARE = 0.005  # of the time of all steps that trials may take
_BUDGET, _LEAST_BUDGET, _MOST_BUDGET = 3.0, 0.2, 3.0
"""Steps whose time there is at first, that are needed to begin, and that may be saved up."""
_WRONG, _REST, _LONGEST_REST = 3, 64, 2048
"""Wrong trials in a row after which there is none for so many steps; twice as many each time."""
_PER_RIGHT = 1.0  # steps of budget that a right draft gives back: it would have saved one


def passes_trial(
    speculation: Speculation,
    rates: AcceptanceRates,
    name: str,
    match_length: int,
    end: int,
    ask: abc.Callable[[int], abc.Sequence[int]],
) -> bool:
    """Whether a sequence may carry a proposer's drafts: those of its latest trial were right.

    Else a trial begins, of what `ask` gives behind tokens[:end], unless the last one is open. Where
    the proposer is right for most sequences, only those need one for which it rested.
    """
    streak, trials = speculation.streak(name), speculation.trials
    trial = trials.get(name)
    if trial is not None and trial.is_over:
        del trials[name]
        accepted, drafted = trial.accepted or 0, len(trial.drafts)
        if accepted >= _CHOSEN_BY and drafted > _CHOSEN_BY:
            rates.learn(name, trial.match_length, accepted - _CHOSEN_BY, drafted - _CHOSEN_BY)
        streak.is_tried = accepted == drafted
    if streak.is_tried or (not streak.rest and rates.trusts(name, match_length)):
        return True
    if name not in trials and (drafts := ask(HOST_DRAFTS)):
        trials[name] = Trial(speculation.sequence, match_length, end, drafts)
    return False


class Trials:
    """One trial at a time of each sequence, and the time that is left for them, in steps."""

    def __init__(self, model: DraftModelProposer, rates: AcceptanceRates) -> None:
        self._model, self._rates = model, rates
        self._budget = _BUDGET
        self._trials: dict[RowKey, Trial] = {}
        self._pending = False  # sequences wait, so that they can be asked for
        self._wrong = self._rest = 0  # in a row, and steps that are left

    def end_step(self) -> None:
        """A step has ended."""
        self._earn(_SHARE)
        self._rest = max(self._rest - 1, 0)

    def forget(self, key: RowKey) -> None:
        """A sequence has ended."""
        self._trials.pop(key, None)

    def may_begin(self) -> bool:
        """Whether the model is to be tried, by what the trials so far have shown."""
        for key, trial in list(self._trials.items()):
            if (accepted := trial.accepted) is not None:
                del self._trials[key]
                self._learn(trial, accepted)
        return self._has_time and not self._rates.is_proven(DRAFT_MODEL)

    def begin(self, looked: abc.Sequence[Speculation], step: StepCost) -> list[Speculation]:
        """Compare tokens of a model that is not proven with those that come.

        It says one for few of the sequences that wait for nothing else, while there is time for
        that, and only where its drafts would pay if they were as often right as is assumed.
        Returns those of the sequences that are to wait, so that it can be tried then.
        """
        candidates = [self._candidate(it, step) for it in looked if self._may_try(it)]
        gain = self._model.least_gain_to_try(step.rows)
        if not candidates or not plan_lengths(candidates, step, gain)[1]:
            self._pending = False
            return []
        speculations = [it.speculation for it in candidates]
        known = [it for it in speculations if it.sequence.tokens[-1] != PENDING][:_SEQUENCES]
        if known:
            self._pending = False
            self._ask(known, step)
        if not self._has_time:
            return []
        self._pending = True
        seconds, waiting = (step.seconds(0, how) for how in (step.synchronous, True))
        self._budget -= (waiting - seconds) / seconds
        return speculations[:_SEQUENCES]

    @property
    def _has_time(self) -> bool:
        """Whether one may be begun: sequences wait for it, or there is time and no rest."""
        if self._pending:
            return self._budget >= -_BUDGET
        return self._budget >= _LEAST_BUDGET and not self._rest

    def _may_try(self, speculation: Speculation) -> bool:
        sequence = speculation.sequence
        if self._model.failed or self._model not in speculation.proposers:
            return False
        return not sequence.waits and not sequence.drafted and sequence.key not in self._trials

    def _candidate(self, speculation: Speculation, step: StepCost) -> DraftCandidate:
        """Its drafts for a sequence, as if this waited for its token, and at the assumed rate."""
        sequence, match_length = speculation.sequence, self._model.match((), 0)
        return DraftCandidate(
            speculation,
            self._model,
            match_length,
            self._rates.assumed(match_length),
            room_for_drafts(sequence),
            pending=True,
            cost=self._model.cost(sequence, step.rows),
        )

    def _ask(self, speculations: abc.Sequence[Speculation], step: StepCost) -> None:
        """Ask for a token of each sequence, to be compared with what comes behind its tokens."""
        before = self._model.seconds
        drafts = self._model.ask([(it.sequence, 1) for it in speculations])
        self._budget -= (self._model.seconds - before) / step.seconds(0, step.synchronous)
        match_length = self._model.match((), 0)
        for sequence in (it.sequence for it in speculations):
            if ids := drafts.get(sequence.key, ()):
                trial = Trial(sequence, match_length, len(sequence.tokens), ids)
                self._trials[sequence.key] = trial

    def _learn(self, trial: Trial, accepted: int) -> None:
        self._earn(_PER_RIGHT * accepted)
        self._wrong = 0 if accepted else self._wrong + 1
        if self._wrong >= _WRONG:
            self._rest = min(_REST << min(self._wrong - _WRONG, 8), _LONGEST_REST)
        self._rates.learn(DRAFT_MODEL, trial.match_length, accepted, len(trial.drafts))

    def _earn(self, steps: float) -> None:
        self._budget = min(self._budget + steps, _MOST_BUDGET)
