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
from typing import Protocol

from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.control.sampling_row import RowKey
from tpdet.drafters.chances import Chances, Luck
from tpdet.drafters.counts import DraftCounts
from tpdet.drafters.drafter import (
    DRAFT_MODEL,
    DRAFTS,
    EARLIER,
    NGRAM,
    OF_REQUESTS,
    SCHEMA,
    Drafter,
)
from tpdet.drafters.earlier import EarlierOutputs
from tpdet.drafters.forced import Forced
from tpdet.drafters.guess import Guess
from tpdet.drafters.ngram import Ngram, PromptPlaces
from tpdet.drafters.of_model import OfModel
from tpdet.drafters.pace import Pace
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.request import Request
from tpdet.scheduler.drafts import add_drafts, room_for_drafts
from tpdet.scheduler.offers import (
    DOUBT,
    OTHERS_PER_ABSENT,
    Captures,
    Found,
    Load,
    choose,
    would_pay,
)
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import PENDING, Sequence, pages_for
from tpdet.scheduler.trials import Trials

SHARE = 0.01
"""Of the time of all steps that looking for drafts may take."""
_MOST_CREDIT = 0.010  # seconds that may be saved up: a long prompt is indexed at once
_LEAST_CREDIT = -0.002  # the rest of a look that took long, perhaps only for other programs
_HANGS = 1.0  # seconds of one look after which a drafter is switched off
_LEAST_TRIED = 4  # sequences on which a draft model is tried, if there are as many
_MOST_SINCE = 8  # steps for which a choice counts that was not made in each
_UNLUCKY = 1.0  # times the doubt by which it may have been unlucky
_SHARE_OF_STEP = 0.25  # that a draft model's step takes, until it is measured
_ENTRY, _LEAST_STEPS = 0.002, 16  # seconds of a sequence's first drafts, and steps that bear them
_BESIDE_PROMPTS = 24
"""Rows with drafts in a step with prompts or with rows over `SHORT_TOKENS`: graphs fit so many."""

_Wanted = tuple[Sequence, Callable[[int], Rows[int]]]
"""A sequence, and what gives at most so many drafts for it."""
Proposer = Callable[[Sequence, int], Rows[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""
_key = attrgetter("key")


class Model(Protocol):
    """A draft model: drafts for many sequences at once, in as many steps as the longest has."""

    def seconds(self, sequences: int) -> float:
        """Of one of its steps, in which each of so many gets a draft; 0 until it is measured."""

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> Rows[Rows[int]]:
        """At most so many drafts behind the known tokens of each sequence."""

    def forget(self, key: RowKey) -> None:
        """Let go of what is kept for a sequence, which may be unknown."""


_log = logging.getLogger("tpdet.engine")


class Drafting:
    """The drafters of all sequences, and what is known of their drafts.

    instead: who drafts for all sequences that have drafters, in place of those; whether it pays is
    not asked then. others: makes a drafter that is asked before the engine's. counts: of each
    drafter, by its name. model: the draft model, if there is one. paused: nobody carries drafts.
    clock: seconds.
    """

    def __init__(
        self,
        drafters: Rows[str] = (),
        runs_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """drafters: the engine's, beside those of requests. clock: seconds, from anywhere."""
        self.instead: Proposer | None = None
        self.counts: dict[str, DraftCounts] = {}
        self.others: Callable[[Sequence], Drafter] | None = None
        self.model: Model | None = None
        self.paused = False
        self.chances, self.pace = Chances(), Pace(runs_ahead)
        self.captures, self._trials = Captures(), Trials()
        self.clock, self._drafters = clock, tuple(drafters)
        self._off: set[str] = set()
        self._earlier = EarlierOutputs()
        self._drafting: set[RowKey] = set()  # sequences that were given drafters
        self._active: dict[RowKey, Sequence] = {}  # those that run no longer ahead, to carry drafts
        self._credit, self._turn = _MOST_CREDIT, 0
        self._rows: list[tuple[str, int, int, int, Luck]] = []  # not yet learned of
        self._model_seconds = 0.0  # that the draft model took since the last step ended
        self._together = False  # all rows wait, so that every sequence may carry drafts
        self._followed: set[RowKey] = set()  # sequences that the draft model has drafted for
        self._entry = _ENTRY  # seconds that the first drafts of a sequence take it more
        self._tried: set[RowKey] = set()  # sequences by which it is tried
        self._chosen = 0  # the step of the latest choice

    def admit(self, request: Request, sequences: Rows[Sequence]) -> None:
        """Give the sequences of a request their drafters, behind the one of what it sent."""
        earlier = self._earlier.of(request) if EARLIER in self._drafters else ()
        places = PromptPlaces(request.prompt_token_ids) if NGRAM in self._drafters else None
        for sequence in sequences:
            if self.others is not None:
                sequence.drafters.append(self.others(sequence))
            constraint = sequence.constraint
            if earlier:
                sequence.drafters.append(Guess(earlier, sequence.prompt_length, EARLIER))
            if SCHEMA in self._drafters and constraint is not None:
                sequence.drafters.append(Forced(constraint.forced_ids, sequence.schema_start.begin))
            if places is not None:
                sequence.drafters.append(Ngram(places))
            if DRAFT_MODEL in self._drafters and self.model is not None:
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
        self._trials.forget(sequence.key)
        self._followed.discard(sequence.key)
        if self.model is not None:
            self.model.forget(sequence.key)
        if EARLIER in self._drafters and not sequence.poisoned:
            output = sequence.tokens[sequence.prompt_length :]
            del output[len(output) - sequence.drafted :]
            known = output.index(PENDING) if PENDING in output else len(output)
            self._earlier.remember(sequence.request, tuple(output[:known]))

    def took(self, positions: int, awaited: bool, seconds: float) -> None:
        """A step took so long; positions: 0 where it computed prompts.

        What the draft model took before it is no part of what its positions cost.
        """
        seconds, self._model_seconds = max(seconds - self._model_seconds, 0.0), 0.0
        self._credit = min(self._credit + SHARE * seconds, _MOST_CREDIT)
        self._trials.step()
        self.chances.step += 1
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
            self.chances.learn(*row)

    def think(self) -> None:
        """What can be done while a step runs: learn of right drafts in the steps before it."""
        rows, self._rows = self._rows, []
        for row in rows:
            self.chances.learn(*row)

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
        if self.instead is not None:
            known = sorted((s for s in ready if s.tokens[-1] != PENDING), key=_key)
            _fill([(s, self._instead(s)) for s in known], counts, budget, alone)
        else:
            looked = [self._look(sequence, len(counts)) for sequence in ready]
            found = [it for it in looked if it is not None]
            self._together = False
            if found:
                share = min(len(looked) / max(1, len(self._drafting & counts.keys())), 1.0)
                self._add_found(found, share, running, counts, budget, alone)
        if not together:  # else it is part of what the step costs
            looking = self.clock() - began - (self._model_seconds - spent)
            self._credit = max(self._credit - looking, _LEAST_CREDIT)

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

    def _look(self, sequence: Sequence, rows: int) -> Found | None:
        """What the drafter that is most likely right has for a sequence, one of so many rows."""
        tokens = sequence.tokens
        pending = tokens[-1] == PENDING
        end = len(tokens) - pending
        tried = self._trials.compare(sequence.key, tokens, end, self.chances)
        most = room_for_drafts(sequence)
        best: Found | None = None
        for drafter in sequence.drafters:
            if drafter.name in self._off:
                continue
            trust = self._trust(drafter, tokens, end)
            if drafter.is_spent:
                sequence.drafters = [it for it in sequence.drafters if it is not drafter]
            if trust and drafter.name == DRAFTS:
                return Found(sequence, drafter, trust, 1.0, most, pending)
            name, luck = drafter.name, sequence.luck.get(drafter.name)
            if not trust or (luck is not None and luck.until > self.chances.step):
                continue
            chance, proven = self.chances.of(name, trust), self.chances.is_proven(name)
            if not proven:
                self._try(sequence, drafter, trust)
            if best is None or (proven, chance) > (best.proven, best.chance):
                asked = pending and name != DRAFT_MODEL  # which always has something
                kept = self.chances.kept(name, chance) if asked else 1.0
                of_model = self._seconds(sequence, drafter, rows)
                found = sequence, drafter, trust, chance, most, pending, kept
                doubt = self.chances.doubt(name, trust)
                best = Found(*found, *of_model, proven, doubt)
        if tried:
            self.chances.learn_kept(tried, best is not None)
        elif sequence.hoped and not pending:  # it waited for this
            self.chances.learn_kept(sequence.hoped, best is not None)
            sequence.hoped = ""
        if best is None:
            self._wait(sequence, False)
        return best

    def _seconds(self, sequence: Sequence, drafter: Drafter, rows: int) -> tuple[float, float]:
        """What each draft of a row takes before the step, in seconds; those of other rows with it.

        A draft model is asked in every step that sequences await together, and in no other. And
        what a step bears of the sequence's first drafts: as many do as it made tokens, or has left.
        """
        if drafter.name != DRAFT_MODEL or self.model is None:
            return 0.0, 0.0
        seconds = self.model.seconds(rows) or _SHARE_OF_STEP * self.pace.time(rows, False)
        if sequence.key in self._followed:
            return seconds, 0.0
        made = max(len(sequence.tokens) - sequence.prompt_length, _LEAST_STEPS)
        left = max(sequence.full_length - len(sequence.tokens), 1)
        return seconds, self._entry / min(made, left)

    def _trust(self, drafter: Drafter, tokens: Rows[int], end: int) -> int:
        began = self.clock()
        try:
            trust = drafter.look(tokens, end)
        except Exception as error:
            self._switch_off(drafter, f"raised {type(error).__name__}: {error}")
            return 0
        took = self.clock() - began
        if took > _HANGS:
            self._switch_off(drafter, f"took {took:.1f} s for one sequence")
        return trust

    def _add_found(
        self,
        found: Rows[Found],
        share: float,
        running: SequenceQueue,
        counts: dict[RowKey, int],
        budget: int,
        alone: bool,
    ) -> None:
        """Add what is told and what pays; the other sequences run ahead again."""
        told = [it for it in found if it.is_told]
        taken: list[tuple[Found, int]] = []
        tried: set[RowKey] = set()
        if len(told) < len(found):
            load = self._load(running, counts, budget, share)
            offered = [it for it in found if it.proven and not it.is_told]
            if offered:
                taken, self._together = choose(offered, load)
            if not taken:
                tried = self._try_model(found, load)
        # Known answers go in few long rows, not a little of each in every step.
        taken = [*((it, max(budget, 1)) for it in told), *taken]
        kept = {it.sequence.key for it, count in taken if count}
        for it in found:
            if it.sequence.key not in kept:
                self._try(it.sequence, it.drafter, it.trust)
                self._wait(it.sequence, it.sequence.key in tried)
        wanted: list[_Wanted] = []
        modelled = self._ask_model(taken)
        for it, count in taken:
            if it.pending:
                if count:
                    it.sequence.hoped = it.drafter.name
                    self._wait(it.sequence, True)
                continue
            it.sequence.drafter, it.sequence.trust = it.drafter, it.trust
            ids = modelled.get(it.sequence.key)
            propose = partial(self._ask, it.drafter, count) if ids is None else partial(_first, ids)
            wanted.append((it.sequence, propose))
        _fill(wanted, counts, budget, alone)
        for it, _ in taken:
            if not it.pending:
                self._wait(it.sequence, it.sequence.drafted > 0 or it.is_told)

    def _load(
        self, running: SequenceQueue, counts: dict[RowKey, int], budget: int, share: float
    ) -> Load:
        """The step without drafts."""
        always = sum(sequence.reads_always for sequence in running)
        pages = sum(pages_for(len(it.tokens)) for it in running if it.key in counts)
        since, self._chosen = self.chances.step - self._chosen, self.chances.step
        since = min(since, _MOST_SINCE)
        return Load(len(counts), always, budget, self.pace, share, self.captures, pages, since)

    def _try(self, sequence: Sequence, drafter: Drafter, trust: int) -> None:
        """Compare a drafter's next token with what comes, which costs nothing."""
        if drafter.name != DRAFT_MODEL and not self._trials.runs(sequence.key):
            end = len(sequence.tokens) - (sequence.tokens[-1] == PENDING)
            ids = self._ask(drafter, 1, 1)
            self._trials.begin(sequence.key, drafter.name, trust, end, ids)

    def _try_model(self, found: Rows[Found], load: Load) -> set[RowKey]:
        """Compare a token of the draft model's with what comes, for few sequences; those that wait.

        That is done where its drafts would pay, but only if it had no luck so far, and while there
        is time left for it.
        """
        found = [it for it in found if it.drafter.name == DRAFT_MODEL]
        hoped = [it.if_lucky(_UNLUCKY) for it in found]
        if not found or self._trials.credit <= 0.0 or not would_pay(hoped, load):
            return set()
        if found[0].proven and would_pay([it.if_lucky(-DOUBT) for it in found], load):
            return set()
        self._tried &= self._drafting
        few = max(_LEAST_TRIED, load.rows // OTHERS_PER_ABSENT + 1)
        self._tried |= {it.sequence.key for it in found[: max(few - len(self._tried), 0)]}
        mine = [it for it in found if it.sequence.key in self._tried]
        free = (it for it in mine if not it.pending and not self._trials.runs(it.sequence.key))
        asked = [(it, 1) for it in free]
        spent = self._model_seconds
        ids = self._ask_model(asked)
        step, awaited = (load.pace.time(load.rows, awaits) for awaits in (load.awaits, True))
        if asked:
            self._trials.credit -= (self._model_seconds - spent + awaited - step) / step
        for it, _ in asked:
            key, end = it.sequence.key, len(it.sequence.tokens)
            self._trials.begin(key, DRAFT_MODEL, it.trust, end, ids.get(key, ()))
        return {it.sequence.key for it in mine}

    def _ask_model(self, taken: Rows[tuple[Found, int]]) -> dict[RowKey, Rows[int]]:
        """The drafts of the draft model, for all its sequences together."""
        asked = [
            (it, min(count, SHORT_TOKENS - 1))
            for it, count in taken
            if it.drafter.name == DRAFT_MODEL and not it.pending and count
        ]
        if not asked or self.model is None:
            return {}
        began = self.clock()
        try:
            found = self.model.draft([(it.sequence, count) for it, count in asked])
        except Exception as error:
            self._switch_off(asked[0][0].drafter, f"raised {type(error).__name__}: {error}")
            found = [()] * len(asked)
        took, most = self.clock() - began, max(count for _, count in asked)
        self._model_seconds += took
        new = {it.sequence.key for it, _ in asked} - self._followed
        self._followed |= new
        if new and most > 1:  # no trial
            more = took - most * self.model.seconds(len(asked))
            self._entry = 0.5 * (self._entry + max(more, 0.0) / len(new))
        return {it.sequence.key: ids for (it, _), ids in zip(asked, found, strict=True)}

    def _ask(self, drafter: Drafter, count: int, most: int) -> Rows[int]:
        """The next drafts for the sequence that a drafter saw last: at most either number."""
        most = min(count, most)
        try:
            return drafter.next(most)[:most] if most > 0 else ()
        except Exception as error:
            self._switch_off(drafter, f"raised {type(error).__name__}: {error}")
            return ()

    def _instead(self, sequence: Sequence) -> Callable[[int], Rows[int]]:
        """What `instead` proposes for a sequence, at most so many."""
        assert self.instead is not None
        sequence.drafter = None
        return partial(self.instead, sequence)

    def _wait(self, sequence: Sequence, waits: bool) -> None:
        """Let a sequence await results, to carry drafts, or run ahead again."""
        sequence.wait_for_drafts(waits)
        if waits:
            self._active[sequence.key] = sequence
        else:
            self._active.pop(sequence.key, None)

    def _switch_off(self, drafter: Drafter, why: str) -> None:
        name = drafter.name
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
