"""The speculator: which sequences carry drafts in the next step, of whom, and how many.

It asks proposers, has the planner decide by acceptance rates and measured times, and learns which
drafts were accepted. Neither clocks nor rates reach a bit.
"""

import logging
import math
import time
from collections import abc
from functools import partial

from tpdet.control.plan import StepPlan
from tpdet.control.row_messages import RowKey
from tpdet.requests.request import Request
from tpdet.scheduler.policy import decodes_freely
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import (
    PENDING,
    Sequence,
    awaits_known_answer,
    known_drafts,
    unknown_tokens,
    unverified_drafts,
)
from tpdet.scheduler.speculator import DraftCounts, Speculator
from tpdet.speculative.acceptance import AcceptanceRates, RejectionStreak
from tpdet.speculative.draft_rows import Proposal, decodes, fill_rows, room_for_drafts, step_room
from tpdet.speculative.planner import (
    DraftCandidate,
    DraftCost,
    DraftedRow,
    Speculation,
    StepCost,
    plan_following,
    plan_lengths,
)
from tpdet.speculative.proposers.draft_model import DraftModelProposer
from tpdet.speculative.proposers.earlier_outputs import EarlierOutputs
from tpdet.speculative.proposers.grammar import ForcedTokens
from tpdet.speculative.proposers.ngram import MOST_DRAFTS as NGRAM_DRAFTS
from tpdet.speculative.proposers.ngram import Ngram, PromptIndex
from tpdet.speculative.proposers.prediction import PredictedOutput, predicted_by
from tpdet.speculative.proposers.proposer import (
    DRAFT_MODEL,
    DRAFTS,
    EARLIER,
    NGRAM,
    OF_REQUESTS,
    SCHEMA,
    UNTRIED,
    BatchProposer,
    Proposer,
)
from tpdet.speculative.step_time import StepTimes
from tpdet.speculative.trials import HOST_DRAFTS, Trials, passes_trial

SHARE = 0.01
"""The share of the time of all steps that looking for drafts may take."""
_MOST_BUDGET = 0.010  # seconds that may be saved up: a long prompt is indexed at once
_LEAST_BUDGET = -0.002  # the rest of a look that took long, perhaps only for other programs
_HANGS = 1.0  # seconds of one look after which a proposer is switched off
_log = logging.getLogger("tpdet.engine")


class DraftSpeculator(Speculator):
    """The `Speculator` that drafts where it is expected to pay; times: of steps so far."""

    def __init__(
        self,
        names: abc.Sequence[str] = (),
        runs_ahead: bool = False,
        clock: abc.Callable[[], float] = time.perf_counter,
        model: BatchProposer | None = None,
        rates: AcceptanceRates | None = None,
        times: StepTimes | None = None,
        first: abc.Callable[[Sequence], Proposer] | None = None,
    ) -> None:
        """names: the engine's proposers, beside those of requests. model: the draft model.

        clock: seconds, from anywhere. rates, times: what was seen of drafts and of steps before.
        first: makes a proposer that is asked before the engine's.
        """
        super().__init__()
        self._clock, self.times = clock, times or StepTimes(runs_ahead)
        self._names, self._first = tuple(names), first
        self._rates = rates or AcceptanceRates()
        self._off: set[str] = set()
        self._model: DraftModelProposer | None = None
        self._trials: Trials | None = None
        if model is not None and DRAFT_MODEL in self._names:
            switch_off = partial(self._switch_off, DRAFT_MODEL)
            self._model = DraftModelProposer(model, self.times, switch_off, clock)
            self._trials = Trials(self._model, self._rates)
        self._earlier = EarlierOutputs()
        self._first_admission = 0  # of the requests whose outputs are the present weights' alone
        self._speculations: dict[RowKey, Speculation] = {}
        self._waiting: dict[RowKey, Speculation] = {}  # run no longer ahead, to carry drafts
        self._budget, self._turn = _MOST_BUDGET, 0  # seconds to look; whose turn it was
        self._rows: list[tuple[str, int, int, int, RejectionStreak]] = []  # not yet learned of
        self._together = False  # drafts pay for all rows, so that every sequence is looked at
        self._follows: bool | None = None  # the planned step's, once that was asked for
        self._ended = 0.0  # when the last step did; 0: there was no work since

    def admit(self, request: Request, sequences: abc.Sequence[Sequence]) -> None:
        """As `Speculator.admit`: the request's own proposer comes first, the draft model last."""
        names = self._names
        earlier = self._earlier.of(request) if EARLIER in names else ()
        prompt = PromptIndex(request.prompt_token_ids) if NGRAM in names else None
        for sequence in sequences:
            own = predicted_by(request, sequence.choice)
            proposers: list[Proposer] = [] if own is None else [own]
            if self._first is not None:
                proposers.append(self._first(sequence))
            if earlier:
                proposers.append(PredictedOutput(earlier, sequence.prompt_length, EARLIER))
            constraint = sequence.constraint
            if SCHEMA in names and constraint is not None:
                begin = sequence.schema_start.begin
                proposers.append(ForcedTokens(constraint.forced_ids, begin))
            if prompt is not None:
                proposers.append(Ngram(prompt))
            if self._model is not None and names:
                proposers.append(self._model)
            if proposers:
                speculation = Speculation(sequence, proposers)
                self._speculations[sequence.key] = speculation
                if own is not None:
                    self._wait(speculation, True)

    def propose(self, running: SequenceQueue, counts: dict[RowKey, int], budget: int) -> None:
        """As `Speculator.propose`; sequences take turns where time to look is short."""
        if not self._speculations or self.paused or not counts:
            return
        began, spent = self._clock(), self._model_seconds
        requested = [it.sequence for key, it in self._waiting.items() if key in counts]
        known = sum(map(known_drafts, requested))
        budget = step_room(counts, budget, known)
        if budget <= 0 and not self._waiting:
            return
        together, until = self._together, began + self._budget
        self._follows = None
        ready = self._ready(running, counts, math.inf if together else until)
        self._add_what_pays(ready, running, counts, budget)
        if not together:  # else it is part of what the step costs
            looking = self._clock() - began - (self._model_seconds - spent)
            self._budget = max(self._budget - looking, _LEAST_BUDGET)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """As `Speculator.learn`: accepted drafts change rates when there is time (`running`)."""
        speculation = self._speculations.get(sequence.key)
        if speculation is None or not speculation.rows:
            return
        drafted_row = speculation.rows.popleft()
        name, head, first = drafted_row.name, drafted_row.head, drafted_row.first
        if name not in self.counts:
            self.counts[name] = DraftCounts()
        self.counts[name].add(drafted, accepted)
        if head:  # the last token of which no row verified as a draft
            tokens = sequence.tokens[first : first + len(head)]
            if tokens != head:
                self._rates.learn_missed(name, accepted, drafted)
                if tokens[:-1] != head[:-1]:
                    return
            accepted, drafted = (accepted + 1, drafted + 1) if tokens == head else (0, 1)
        row = name, drafted_row.match_length, accepted, drafted, speculation.streak(name)
        if accepted:
            self._rows.append(row)
        else:
            self._rates.learn(*row)

    def stop(self, sequence: Sequence) -> None:
        """As `Speculator.stop`."""
        if (speculation := self._speculations.get(sequence.key)) is not None:
            speculation.proposers = []
            speculation.rows.clear()
            self._wait(speculation, False)

    def finish(self, sequence: Sequence) -> None:
        """As `Speculator.finish`: its output is remembered where that is asked for."""
        self._speculations.pop(sequence.key, None)
        self._waiting.pop(sequence.key, None)
        if self._model is not None and self._trials is not None:
            self._trials.forget(sequence.key)
            self._model.forget(sequence.key)
        if self._remembers(sequence):
            output = sequence.tokens[sequence.prompt_length :]
            del output[len(output) - sequence.drafted :]
            known = output.index(PENDING) if PENDING in output else len(output)
            self._earlier.remember(sequence.request, tuple(output[:known]))

    def forget(self, admission: int) -> None:
        """As `Speculator.forget`."""
        self._earlier, self._first_admission = EarlierOutputs(), admission
        for speculation in self._speculations.values():
            kept = [it for it in speculation.proposers if it.name != EARLIER]
            speculation.proposers = kept

    def close(self) -> None:
        """As `Speculator.close`."""
        self._names = ()
        for speculation in self._speculations.values():
            self.stop(speculation.sequence)

    def running(self) -> None:
        """As `Speculator.running`: learn of accepted drafts in the steps before this one."""
        rows, self._rows = self._rows, []
        for row in rows:
            self._rates.learn(*row)

    def end(self, plan: StepPlan, synchronous: bool) -> None:
        """As `Speculator.end`: the time since the step before has ended."""
        before, self._ended = self._ended, self._clock()
        if before:
            rows = plan.rows
            decodes_only = bool((rows.count == rows.samples).all())
            positions = int(rows.count.sum()) if decodes_only else 0
            self.observe(positions, synchronous, self._ended - before)

    def idle(self) -> None:
        """As `Speculator.idle`."""
        self._ended = 0.0

    def observe(self, positions: int, synchronous: bool, seconds: float) -> None:
        """Learn that a step took so long; positions: 0 where it computed prompts.

        What the draft model took before it is no part of what its positions cost.
        """
        if self._model is not None and self._trials is not None:
            seconds -= self._model.end_step()
            self._trials.end_step()
        seconds = max(seconds, 0.0)
        self._budget = min(self._budget + SHARE * seconds, _MOST_BUDGET)
        self._rates.step += 1
        if positions:
            self.times.add(positions, synchronous, seconds)

    def _remembers(self, sequence: Sequence) -> bool:
        """Whether a sequence's output may be a draft of later ones."""
        own = sequence.key[0] >= self._first_admission
        return EARLIER in self._names and own and not sequence.poisoned

    @property
    def _model_seconds(self) -> float:
        return 0.0 if self._model is None else self._model.seconds

    def _ready(
        self, running: SequenceQueue, counts: dict[RowKey, int], until: float
    ) -> abc.Iterator[Speculation]:
        """The decoding sequences of a step that carry drafts; then others, while there is time."""
        waiting = self._waiting.copy()
        for key in sorted(waiting):
            speculation = waiting[key]
            if key in counts and speculation.proposers and decodes(speculation.sequence):
                yield speculation
        for _ in range(len(running)):
            if self._clock() > until:
                break
            self._turn = (self._turn + 1) % len(running)
            sequence = running[self._turn]
            key = sequence.key
            other = None if key in waiting else self._speculations.get(key)
            if other is not None and other.proposers and key in counts and decodes(sequence):
                yield other

    def _add_what_pays(
        self,
        ready: abc.Iterator[Speculation],
        running: SequenceQueue,
        counts: dict[RowKey, int],
        budget: int,
    ) -> None:
        """Look at sequences that are ready, and add the drafts that are expected to pay."""
        rows = len(counts)
        looked = [(speculation, self._look(speculation, running, counts)) for speculation in ready]
        candidates = [candidate for _, candidate in looked if candidate is not None]
        self._together = False
        trials = self._trials if self._trials is not None and self._trials.may_begin() else None
        if not candidates and trials is None:
            return
        share = min(len(looked) / max(1, len(self._speculations.keys() & counts.keys())), 1.0)
        waiting = sum(sequence.reads_always for sequence in running)
        step = StepCost(rows, waiting, budget, self.times, share)
        self._add(candidates, step, counts)
        if trials is not None:
            for speculation in trials.begin([it for it, _ in looked], step):
                self._wait(speculation, True)

    def _look(
        self, speculation: Speculation, running: SequenceQueue, counts: dict[RowKey, int]
    ) -> DraftCandidate | None:
        """What the proposer that is most likely right has for a sequence of a step."""
        best = self._best_candidate(speculation, running, counts)
        if best is not None and best.is_requested:
            return best
        if speculation.expected and not unknown_tokens(speculation.sequence):  # it waited for this
            self._rates.learn_availability(speculation.expected, best is not None)
            speculation.expected = ""
        if best is None:
            self._wait(speculation, False)
        return best

    def _best_candidate(
        self, speculation: Speculation, running: SequenceQueue, counts: dict[RowKey, int]
    ) -> DraftCandidate | None:
        sequence, rates = speculation.sequence, self._rates
        unknown = unknown_tokens(sequence)
        room = room_for_drafts(sequence)
        best: DraftCandidate | None = None
        for proposer in speculation.proposers:
            name = proposer.name
            if name in self._off or not rates.is_proven(name):
                continue
            end = len(sequence.tokens) - unknown
            length = self._match(proposer, sequence.tokens, end)
            if proposer.is_spent:
                others = [it for it in speculation.proposers if it is not proposer]
                speculation.proposers = others
            if not length:
                continue
            if name == DRAFTS:
                return DraftCandidate(speculation, proposer, length, 1.0, room, unknown > 0)
            if speculation.streak(name).until > rates.step:
                continue
            ask = partial(self._ask, proposer, HOST_DRAFTS, None)
            if name not in UNTRIED and not passes_trial(speculation, rates, name, length, end, ask):
                continue
            rate, availability, cost = rates.rate(name, length), 1.0, DraftCost()
            if best is not None and rate <= best.rate:
                continue
            follows = self._may_follow(running, counts)
            pending = unknown > 0 and not follows
            before = unknown + (unverified_drafts(sequence) > 0) if follows else 0
            most = min(room, NGRAM_DRAFTS) if name == NGRAM or follows else room
            if self._model is not None and proposer is self._model:
                cost = self._model.cost(sequence, len(counts))
            elif pending:
                availability = rates.availability(name, rate)
            best = DraftCandidate(
                speculation,
                proposer,
                length,
                rate,
                most,
                pending,
                availability,
                cost,
                before,
                rates.rate_missed(name),
            )
        return best

    def _match(self, proposer: Proposer, tokens: abc.Sequence[int], end: int) -> int:
        began = self._clock()
        try:
            length = proposer.match(tokens, end)
        except Exception as error:
            self._switch_off(proposer.name, f"raised {type(error).__name__}: {error}")
            return 0
        seconds = self._clock() - began
        if seconds > _HANGS:
            self._switch_off(proposer.name, f"took {seconds:.1f} s for one sequence")
        return length

    def _add(
        self, candidates: abc.Sequence[DraftCandidate], step: StepCost, counts: dict[RowKey, int]
    ) -> None:
        """Add what is requested and what pays; the other sequences run ahead again."""
        model = self._model
        others, follows = [it for it in candidates if not it.is_requested], bool(self._follows)
        gain = 1.0 if model is None else model.least_gain(step.rows)
        if follows:
            lengths = plan_following(others, step)
            self._together = bool(lengths)
        else:
            lengths, self._together = plan_lengths(others, step, gain)
        # Known answers go in few long rows, not a little of each in every step.
        requested = [(it, max(step.budget, 1)) for it in candidates if it.is_requested]
        lengths = [*requested, *lengths]
        carrying = {it.sequence.key for it, count in lengths if count}
        for candidate in candidates:
            if candidate.sequence.key not in carrying:
                self._wait(candidate.speculation, False)
        of_model = {} if model is None else model.draft(lengths)
        proposals: list[Proposal] = []
        for candidate, count in lengths:
            speculation, proposer = candidate.speculation, candidate.proposer
            if candidate.pending:
                if count:
                    speculation.expected = "" if candidate.is_of_model else proposer.name
                    self._wait(speculation, True)
                continue
            sequence = candidate.sequence
            sequence.drafts_are_requested = proposer.name in OF_REQUESTS
            drafts = of_model.get(sequence.key)
            propose = partial(self._ask, proposer, count, drafts)
            speculation.head = ()
            if candidate.before:
                propose = partial(self._ask_behind, candidate, count)
            proposals.append((sequence, propose))
        for sequence in fill_rows(proposals, counts, step.budget):
            if awaits_known_answer(sequence):
                del counts[sequence.key]  # it is in the next step, with its drafts
        for candidate, _ in lengths:
            if candidate.pending:
                continue
            speculation, sequence = candidate.speculation, candidate.sequence
            if carries := counts.get(sequence.key, 1) > 1:
                of = candidate.proposer.name, candidate.match_length
                row = DraftedRow(*of, speculation.first, speculation.head)
                speculation.rows.append(row)
            self._wait(speculation, carries or candidate.is_requested, follows)

    def _ask(
        self, proposer: Proposer, count: int, drafts: abc.Sequence[int] | None, most: int
    ) -> abc.Sequence[int]:
        """The next drafts for the sequence that a proposer saw last: at most either number.

        drafts: those that a draft model has made already.
        """
        if drafts is not None:
            return drafts[:most]
        most = min(count, most)
        try:
            return proposer.propose(most)[:most] if most > 0 else ()
        except Exception as error:
            self._switch_off(proposer.name, f"raised {type(error).__name__}: {error}")
            return ()

    def _ask_behind(self, candidate: DraftCandidate, count: int, most: int) -> abc.Sequence[int]:
        """As `_ask`, behind tokens that a step still verifies: what `Proposal` says."""
        sequence, speculation = candidate.sequence, candidate.speculation
        unknown = unknown_tokens(sequence)
        known = len(sequence.tokens) - unknown
        said = self._ask(candidate.proposer, candidate.before + count, None, unknown + most)
        drafts = sequence.tokens[known : known + unverified_drafts(sequence)]
        speculation.first = known
        speculation.head = [*drafts, *said[len(drafts) : candidate.before]]
        return said[unknown:]

    def _may_follow(self, running: SequenceQueue, counts: dict[RowKey, int]) -> bool:
        """Whether rows of the planned step may follow drafts that the one before verifies."""
        if self._follows is None:
            speculations = map(self._speculations.get, counts)
            self._follows = (
                self.times.runs_ahead
                and max(counts.values()) == 1
                and decodes_freely(running)
                and all(it is None or it.guesses for it in speculations)
            )
        return self._follows

    def _wait(self, speculation: Speculation, carries: bool, follows: bool = False) -> None:
        """Let a sequence carry drafts, or go on without.

        It awaits results for them, unless rows follow drafts that are not verified.
        """
        sequence = speculation.sequence
        sequence.wait_for_drafts(carries and not follows)
        if carries:
            self._waiting[sequence.key] = speculation
        else:
            self._waiting.pop(sequence.key, None)

    def _switch_off(self, name: str, why: str) -> None:
        self._off.add(name)
        self.counts.setdefault(name, DraftCounts()).switched_off = 1
        memory = "; its weights and KV pages stay until the end" if name == DRAFT_MODEL else ""
        _log.warning("drafter %s %s: it is switched off, answers go on%s", name, why, memory)
