"""Which sequences carry drafts in the next step, and how many: where it is expected to pay.

A row with drafts saves the steps of those that are right. It costs what its positions add to the
step, and what it costs to await results: a sequence that is to carry drafts cannot run ahead. This
is decided by the share of drafts that were right and by measured times. Neither reaches a bit.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from functools import partial
from operator import attrgetter

from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.control.row_messages import RowKey
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.requests.request import Request
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import PENDING, Sequence
from tpdet.speculative.acceptance import Chances, Luck
from tpdet.speculative.counts import DraftCounts
from tpdet.speculative.draft_model.drafting import Model, ModelDrafting
from tpdet.speculative.drafts import add_drafts, room_for_drafts
from tpdet.speculative.planner import Found, Load, choose
from tpdet.speculative.proposal import (
    DRAFT_MODEL,
    DRAFTS,
    EARLIER,
    NGRAM,
    OF_REQUESTS,
    SCHEMA,
    Drafter,
)
from tpdet.speculative.proposers.draft_model import OfModel
from tpdet.speculative.proposers.earlier_outputs import EarlierOutputs
from tpdet.speculative.proposers.grammar import Forced
from tpdet.speculative.proposers.ngram import Ngram, PromptPlaces
from tpdet.speculative.proposers.prediction import Guess
from tpdet.speculative.step_time import Pace

SHARE = 0.01
"""Of the time of all steps that looking for drafts may take."""
_MOST_CREDIT = 0.010  # seconds that may be saved up: a long prompt is indexed at once
_LEAST_CREDIT = -0.002  # the rest of a look that took long, perhaps only for other programs
_HANGS = 1.0  # seconds of one look after which a drafter is switched off
_BESIDE_PROMPTS = 24
"""Rows with drafts in a step with prompts or with rows over `SHORT_TOKENS`: graphs fit so many."""

_Wanted = tuple[Sequence, Callable[[int], Rows[int]]]
"""A sequence, and what gives at most so many drafts for it."""
Proposer = Callable[[Sequence, int], Rows[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""
_key = attrgetter("key")
_log = logging.getLogger("tpdet.engine")


class Drafting:
    """The drafters of all sequences, and what is known of their drafts.

    counts: of each drafter, by its name. paused: nobody carries drafts.
    """

    def __init__(
        self,
        drafters: Rows[str] = (),
        runs_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        model: Model | None = None,
        chances: Chances | None = None,
        pace: Pace | None = None,
        first: Callable[[Sequence], Drafter] | None = None,
        instead: Proposer | None = None,
    ) -> None:
        """drafters: the engine's, beside those of requests. clock: seconds, from anywhere.

        model: the draft model, if there is one. chances, pace: what was seen of drafts and of steps
        before. first: makes a drafter that is asked before the engine's. instead: who drafts for
        all sequences that have drafters, in place of those; whether it pays is not asked then.
        """
        self.counts: dict[str, DraftCounts] = {}
        self.paused = False
        self.clock, self.pace = clock, pace or Pace(runs_ahead)
        self._drafters, self._first, self._instead = tuple(drafters), first, instead
        self._chances = chances or Chances()
        self._off: set[str] = set()
        self._model: ModelDrafting | None = None
        if model is not None and DRAFT_MODEL in self._drafters:
            switch_off = partial(self._switch_off, DRAFT_MODEL)
            self._model = ModelDrafting(model, self._chances, self.pace, switch_off, clock)
        self._earlier = EarlierOutputs()
        self._drafting: set[RowKey] = set()  # sequences that were given drafters
        self._active: dict[RowKey, Sequence] = {}  # those that run no longer ahead, to carry drafts
        self._credit, self._turn = _MOST_CREDIT, 0
        self._rows: list[tuple[str, int, int, int, Luck]] = []  # not yet learned of
        self._together = False  # all rows wait, so that every sequence may carry drafts

    def admit(self, request: Request, sequences: Rows[Sequence]) -> None:
        """Give the sequences of a request their drafters, behind the one of what it sent."""
        earlier = self._earlier.of(request) if EARLIER in self._drafters else ()
        places = PromptPlaces(request.prompt_token_ids) if NGRAM in self._drafters else None
        for sequence in sequences:
            if self._first is not None:
                sequence.drafters.append(self._first(sequence))
            constraint = sequence.constraint
            if earlier:
                sequence.drafters.append(Guess(earlier, sequence.prompt_length, EARLIER))
            if SCHEMA in self._drafters and constraint is not None:
                sequence.drafters.append(Forced(constraint.forced_ids, sequence.schema_start.begin))
            if places is not None:
                sequence.drafters.append(Ngram(places))
            if self._model is not None and self._drafters:
                sequence.drafters.append(OfModel())
            if sequence.drafters:
                self._drafting.add(sequence.key)
            if sequence.waits:
                self._active[sequence.key] = sequence

    def close(self) -> None:
        """No sequence that comes gets the engine's drafters any more."""
        self._drafters = ()

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended: remember its output where that is asked for."""
        self._drafting.discard(sequence.key)
        self._active.pop(sequence.key, None)
        if self._model is not None:
            self._model.forget(sequence.key)
        if EARLIER in self._drafters and not sequence.poisoned:
            output = sequence.tokens[sequence.prompt_length :]
            del output[len(output) - sequence.drafted :]
            known = output.index(PENDING) if PENDING in output else len(output)
            self._earlier.remember(sequence.request, tuple(output[:known]))

    def took(self, positions: int, awaited: bool, seconds: float) -> None:
        """A step took so long; positions: 0 where it computed prompts.

        What the draft model took before it is no part of what its positions cost.
        """
        by_model = 0.0 if self._model is None else self._model.end_step()
        seconds = max(seconds - by_model, 0.0)
        self._credit = min(self._credit + SHARE * seconds, _MOST_CREDIT)
        self._chances.step += 1
        if positions:
            self.pace.took(positions, awaited, seconds)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` of a row's drafts were right.

        Right drafts change chances when there is time (`think`), not while the GPU waits.
        """
        drafter = sequence.drafter
        if drafter is None:
            return
        name, luck = drafter.name, sequence.luck
        if name not in luck:
            luck[name] = Luck()
        if name not in self.counts:
            self.counts[name] = DraftCounts()
        self.counts[name].add(drafted, accepted)
        row = name, sequence.trust, accepted, drafted, luck[name]
        if accepted:
            self._rows.append(row)
        else:
            self._chances.learn(*row)

    def think(self) -> None:
        """What can be done while a step runs: learn of right drafts in the steps before it."""
        rows, self._rows = self._rows, []
        for row in rows:
            self._chances.learn(*row)

    def add(self, running: SequenceQueue, counts: dict[RowKey, int], budget: int) -> None:
        """Let decoding rows of a step carry drafts, as many as are left of its budget.

        No more than the graph of a step with drafts has rows for: without prompts and longer rows
        `HEAD_ROWS`. With them only few rows carry drafts, as attention has little room for each.
        counts: the tokens of each row, which grow by the drafts.
        """
        if not self._drafting or self.paused or not counts:
            return
        began, spent = self.clock(), self._model_seconds
        alone = max(counts.values()) == 1
        budget = min(budget, MAX_STEP_DRAFTS, HEAD_ROWS - len(counts) if alone else budget)
        if budget <= 0 and not self._active:
            return
        together, until = self._together, began + self._credit
        ready = self._ready(running, counts, math.inf if together else until)
        if self._instead is not None:
            known = sorted((s for s in ready if s.tokens[-1] != PENDING), key=_key)
            _fill([(s, self._other_drafts(s)) for s in known], counts, budget, alone)
        else:
            self._add_what_pays(ready, running, counts, budget, alone)
        if not together:  # else it is part of what the step costs
            looking = self.clock() - began - (self._model_seconds - spent)
            self._credit = max(self._credit - looking, _LEAST_CREDIT)

    @property
    def _model_seconds(self) -> float:
        return 0.0 if self._model is None else self._model.seconds

    def _add_what_pays(
        self,
        ready: Iterator[Sequence],
        running: SequenceQueue,
        counts: dict[RowKey, int],
        budget: int,
        alone: bool,
    ) -> None:
        """Look at sequences that are ready, and add the drafts that are expected to pay."""
        rows, model = len(counts), self._model
        proven = model if model is not None and model.is_proven else None
        looked = [(sequence, self._look(sequence, rows, proven)) for sequence in ready]
        found = [it for _, it in looked if it is not None]
        self._together = False
        tried = model if model is not None and model.may_try() else None
        if not found and tried is None:
            return
        share = min(len(looked) / max(1, len(self._drafting & counts.keys())), 1.0)
        always = sum(sequence.reads_always for sequence in running)
        load = Load(rows, always, budget, self.pace, share)
        self._add_found(found, load, counts, alone)
        if tried is not None:
            for sequence in tried.try_out([sequence for sequence, _ in looked], load):
                self._wait(sequence, True)

    def _ready(
        self, running: SequenceQueue, counts: dict[RowKey, int], until: float
    ) -> Iterator[Sequence]:
        """The decoding sequences of a step that carry drafts; then others, while there is time.

        Those take turns.
        """
        active = self._active.copy()
        for key in sorted(active):
            sequence = active[key]
            if key in counts and sequence.drafters and _decodes(sequence):
                yield sequence
        for _ in range(len(running)):
            if self.clock() > until:
                break
            self._turn = (self._turn + 1) % len(running)
            sequence = running[self._turn]
            may = sequence.drafters and sequence.key not in active
            if may and sequence.key in counts and _decodes(sequence):
                yield sequence

    def _look(self, sequence: Sequence, rows: int, model: ModelDrafting | None) -> Found | None:
        """What the drafter that is most likely right has for a sequence, one of so many rows.

        model: the draft model, if it may be asked.
        """
        tokens = sequence.tokens
        pending = tokens[-1] == PENDING
        end = len(tokens) - pending
        most = room_for_drafts(sequence)
        best: Found | None = None
        for drafter in sequence.drafters:
            by_model = drafter.name == DRAFT_MODEL
            if drafter.name in self._off or (by_model and model is None):
                continue
            trust = self._trust(drafter, tokens, end)
            if drafter.is_spent:
                sequence.drafters = [it for it in sequence.drafters if it is not drafter]
            if trust and drafter.name == DRAFTS:
                return Found(sequence, drafter, trust, 1.0, most, pending)
            luck = sequence.luck.get(drafter.name)
            if trust and (luck is None or luck.until <= self._chances.step):
                name = drafter.name
                chance = self._chances.of(name, trust)
                is_best = best is None or chance > best.chance
                if is_best and model is not None and by_model:
                    best = model.offer(sequence, drafter, trust, rows)
                elif is_best:
                    kept = self._chances.kept(name, chance) if pending else 1.0
                    best = Found(sequence, drafter, trust, chance, most, pending, kept)
        if sequence.hoped and not pending:  # it waited for this
            self._chances.learn_kept(sequence.hoped, best is not None)
            sequence.hoped = ""
        if best is None:
            self._wait(sequence, False)
        return best

    def _trust(self, drafter: Drafter, tokens: Rows[int], end: int) -> int:
        began = self.clock()
        try:
            trust = drafter.look(tokens, end)
        except Exception as error:
            self._switch_off(drafter.name, f"raised {type(error).__name__}: {error}")
            return 0
        took = self.clock() - began
        if took > _HANGS:
            self._switch_off(drafter.name, f"took {took:.1f} s for one sequence")
        return trust

    def _add_found(
        self, found: Rows[Found], load: Load, counts: dict[RowKey, int], alone: bool
    ) -> None:
        """Add what is told and what pays; the other sequences run ahead again."""
        told = [it for it in found if it.is_told]
        taken: list[tuple[Found, int]] = []
        if len(told) < len(found):
            others = [it for it in found if not it.is_told]
            decide = choose if self._model is None else self._model.choose
            taken, self._together = decide(others, load)
        # Known answers go in few long rows, not a little of each in every step.
        taken = [*((it, max(load.room, 1)) for it in told), *taken]
        kept = {it.sequence.key for it, count in taken if count}
        for it in found:
            if it.sequence.key not in kept:
                self._wait(it.sequence, False)
        wanted: list[_Wanted] = []
        modelled = {} if self._model is None else self._model.draft(taken)
        for it, count in taken:
            if it.pending:
                if count:
                    it.sequence.hoped = it.drafter.name if it.drafter.name != DRAFT_MODEL else ""
                    self._wait(it.sequence, True)
                continue
            it.sequence.drafter, it.sequence.trust = it.drafter, it.trust
            ids = modelled.get(it.sequence.key)
            propose = partial(self._ask, it.drafter, count) if ids is None else partial(_first, ids)
            wanted.append((it.sequence, propose))
        _fill(wanted, counts, load.room, alone)
        for it, _ in taken:
            if not it.pending:
                self._wait(it.sequence, it.sequence.drafted > 0 or it.is_told)

    def _ask(self, drafter: Drafter, count: int, most: int) -> Rows[int]:
        """The next drafts for the sequence that a drafter saw last: at most either number."""
        most = min(count, most)
        try:
            return drafter.next(most)[:most] if most > 0 else ()
        except Exception as error:
            self._switch_off(drafter.name, f"raised {type(error).__name__}: {error}")
            return ()

    def _other_drafts(self, sequence: Sequence) -> Callable[[int], Rows[int]]:
        """What `instead` proposes for a sequence, at most so many."""
        assert self._instead is not None
        sequence.drafter = None
        return partial(self._instead, sequence)

    def _wait(self, sequence: Sequence, waits: bool) -> None:
        """Let a sequence await results, to carry drafts, or run ahead again."""
        sequence.wait_for_drafts(waits)
        if waits:
            self._active[sequence.key] = sequence
        else:
            self._active.pop(sequence.key, None)

    def _switch_off(self, name: str, why: str) -> None:
        self._off.add(name)
        self.counts.setdefault(name, DraftCounts()).switched_off = 1
        kept = "; its weights and KV pages stay until the end" if name == DRAFT_MODEL else ""
        _log.warning("drafter %s %s: it is switched off, answers go on%s", name, why, kept)


def sent_by_client(sequence: Sequence) -> bool:
    """Whether the drafts of a sequence's row are tokens that its request brought."""
    return sequence.drafter is not None and sequence.drafter.name in OF_REQUESTS


def _fill(wanted: Rows[_Wanted], counts: dict[RowKey, int], budget: int, alone: bool) -> None:
    """Add drafts in this order while the budget lasts; alone: no row of the step has many tokens.

    Beside rows with many tokens only few rows carry drafts.
    """
    drafted = 0
    for sequence, propose in wanted:
        few = drafted < _BESIDE_PROMPTS
        if not (few or alone):
            break
        most = min(budget if few else min(budget, SHORT_TOKENS - 1), room_for_drafts(sequence))
        added = add_drafts(sequence, propose(most)[:most]) if most > 0 else 0
        counts[sequence.key] += added
        budget -= added
        drafted += added > 0
        alone &= added < SHORT_TOKENS


def _first(drafts: Rows[int], most: int) -> Rows[int]:
    return drafts[:most]


def _decodes(sequence: Sequence) -> bool:
    return sequence.remaining == 1 and len(sequence.tokens) > sequence.prompt_length
