"""Which sequences carry drafts in the next step, and how many: where it is expected to pay.

A row with drafts saves the steps of those that are right. It costs what its positions add to the
step, and what it costs to await results: a sequence that is to carry drafts cannot run ahead. This
is decided by the share of drafts that were right and by measured times. Neither reaches a bit.
"""

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.control.sampling_row import RowKey
from tpdet.drafters.chances import Chances
from tpdet.drafters.counts import DraftCounts
from tpdet.drafters.drafter import DRAFTS, EARLIER, NGRAM, OF_REQUESTS, SCHEMA, Drafter
from tpdet.drafters.earlier import EarlierOutputs
from tpdet.drafters.forced import Forced
from tpdet.drafters.guess import Guess
from tpdet.drafters.ngram import GRAM, Ngram, PromptPlaces
from tpdet.drafters.pace import POSITION, Pace
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.request import Request
from tpdet.scheduler.drafts import add_drafts, room_for_drafts
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import PENDING, Sequence

OTHERS_PER_ABSENT = 10
"""Least other running sequences for each that sits out a step which is planned ahead."""
SHARE = 0.01
"""Of the time of all steps that looking for drafts may take."""
_MOST_CREDIT = 0.010  # seconds that may be saved up: a long prompt is indexed at once
_HANGS = 1.0  # seconds of one look after which a drafter is switched off
_BESIDE_PROMPTS = 24
"""Rows with drafts in a step with prompts or with rows over `SHORT_TOKENS`: graphs fit so many."""
_GAIN = 1.02  # what drafts must be expected to gain
_SIT_OUT = 1.1  # tokens that a row must gain if its sequence sits out the next step for it
_MOST_DOUBT = 5
_TRY_EVERY, _TRIES = 256, 4  # refusals of which so many are taken up all the same

Proposer = Callable[[Sequence, int], Rows[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""
_log = logging.getLogger("tpdet.engine")


@dataclass(frozen=True, slots=True)
class _Offer:
    """Drafts that a sequence could carry: `count` of them, of which `gain` may be right.

    pending: its last token is not known, so it would have to wait first. net: the gain less what
    the positions cost, in tokens.
    """

    sequence: Sequence
    drafter: Drafter
    trust: int
    pending: bool
    count: int
    gain: float
    net: float


class Drafting:
    """The drafters of all sequences, and what is known of their drafts.

    instead: who drafts for all sequences that have drafters, in place of those; whether it pays is
    not asked then. counts: of each drafter, by its name. paused: nobody carries drafts. clock:
    seconds.
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
        self.paused = False
        self.chances, self.pace = Chances(), Pace(runs_ahead)
        self.clock, self._drafters = clock, tuple(drafters)
        self._off: set[str] = set()
        self._earlier = EarlierOutputs()
        self._drafting: set[RowKey] = set()  # sequences that were given drafters
        self._active: dict[RowKey, Sequence] = {}  # those that run no longer ahead, to carry drafts
        self._credit, self._turn = _MOST_CREDIT, 0
        self._refused = 0

    def admit(self, request: Request, sequences: Rows[Sequence]) -> None:
        """Give the sequences of a request their drafters, behind the one of what it sent."""
        earlier = self._earlier.of(request) if EARLIER in self._drafters else ()
        places = PromptPlaces(request.prompt_token_ids) if NGRAM in self._drafters else None
        for sequence in sequences:
            first, constraint = sequence.prompt_length, sequence.constraint
            if earlier:
                sequence.drafters.append(Guess(earlier, first, EARLIER))
            if SCHEMA in self._drafters and constraint is not None:
                sequence.drafters.append(Forced(constraint.forced_ids, first))
            if places is not None:
                sequence.drafters.append(Ngram(places))
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
        if EARLIER in self._drafters and not sequence.poisoned:
            output = sequence.tokens[sequence.prompt_length :]
            del output[len(output) - sequence.drafted :]
            known = output.index(PENDING) if PENDING in output else len(output)
            self._earlier.remember(sequence.request, tuple(output[:known]))

    def took(self, positions: int, awaited: bool, seconds: float) -> None:
        """A step took so long; positions: 0 where it computed prompts."""
        self._credit = min(self._credit + SHARE * seconds, _MOST_CREDIT)
        if positions:
            self.pace.took(positions, awaited, seconds)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` of a row's drafts were right."""
        drafter = sequence.drafter
        if drafter is None:
            return
        self.chances.learn(drafter.name, sequence.trust, accepted, drafted)
        self.counts.setdefault(drafter.name, DraftCounts()).add(drafted, accepted)
        if not accepted:
            sequence.doubt = min(sequence.doubt + 1, _MOST_DOUBT)
        elif accepted == drafted:
            sequence.doubt = max(sequence.doubt - 1, 0)

    def add(
        self,
        running: SequenceQueue,
        counts: dict[RowKey, int],
        budget: int,
    ) -> None:
        """Let decoding rows of a step carry drafts, as many as are left of its budget.

        No more than the graph of a step with drafts has rows for: without prompts and longer rows
        `HEAD_ROWS`. With them only few rows carry drafts, as attention has little room for each.
        counts: the tokens of each row, which grow by the drafts.
        """
        if not self._drafting or self.paused or not counts:
            return
        began = self.clock()
        alone = max(counts.values()) == 1
        budget = min(budget, MAX_STEP_DRAFTS, HEAD_ROWS - len(counts) if alone else budget)
        chosen = self._offers(running, counts, began)
        if self.instead is None:
            chosen = self._worthwhile(chosen, running)
        drafted = 0
        for offer in chosen:
            sequence, few = offer.sequence, drafted < _BESIDE_PROMPTS
            if offer.pending:
                self._wait(sequence, True)
                continue
            if not (few or alone):
                break
            most = budget if few else min(budget, SHORT_TOKENS - 1)
            added = self._propose(offer, min(most, offer.count))
            counts[sequence.key] += added
            budget -= added
            drafted += added > 0
            alone &= added < SHORT_TOKENS
        self._credit -= self.clock() - began

    def _offers(
        self, running: SequenceQueue, counts: dict[RowKey, int], began: float
    ) -> list[_Offer]:
        """The offers of the sequences that carry drafts, and of others while there is time."""
        rows = len(counts)
        active = [self._active[key] for key in sorted(self._active) if key in counts]
        ready = [each for each in active if each.drafters and _decodes(each)]
        offers = [self._offer(sequence, rows) for sequence in ready]
        until = began + self._credit
        for _ in range(len(running)):
            if self.clock() > until:
                break
            self._turn = (self._turn + 1) % len(running)
            sequence = running[self._turn]
            if (
                sequence.drafters
                and not sequence.waits
                and sequence.key in counts
                and _decodes(sequence)
            ):
                offers.append(self._offer(sequence, rows))
        return [offer for offer in offers if offer is not None]

    def _offer(self, sequence: Sequence, rows: int) -> _Offer | None:
        """What a sequence could carry in a step of so many rows; None if nothing."""
        tokens = sequence.tokens
        pending = tokens[-1] == PENDING
        if self.instead is not None:
            most = 0 if pending else room_for_drafts(sequence)
            return _Offer(sequence, sequence.drafters[0], 0, False, most, 0.0, 0.0)
        end = len(tokens) - pending
        for drafter in sequence.drafters:
            trust = 0 if drafter.name in self._off else self._look(drafter, tokens, end)
            if drafter.is_spent:
                sequence.drafters = [it for it in sequence.drafters if it is not drafter]
            if drafter.name != DRAFTS:
                trust >>= sequence.doubt
            if trust >= GRAM:
                chance = 1.0 if drafter.name == DRAFTS else self.chances.of(drafter.name, trust)
                count = min(_best_count(chance, rows), room_for_drafts(sequence))
                if chance == 1.0:
                    gain = float(count)
                else:
                    gain = chance * (1.0 - chance**count) / (1.0 - chance)
                gain *= chance * chance if pending else 1.0  # the tokens until then must be right
                net = gain - POSITION * rows * count
                return _Offer(sequence, drafter, trust, pending, count, gain, net)
        self._wait(sequence, False)
        return None

    def _worthwhile(self, offers: list[_Offer], running: SequenceQueue) -> list[_Offer]:
        """The offers that are taken up; the other sequences run ahead again."""
        if not offers:
            return offers
        told = [offer for offer in offers if offer.drafter.name == DRAFTS]  # not asked whether
        chosen = [offer for offer in offers if offer.drafter.name != DRAFTS and offer.net > 0.0]
        rows = len(running)
        always = sum(sequence.reads_always for sequence in running)
        awaits = not self.pace.runs_ahead or always * OTHERS_PER_ABSENT > rows - always
        if not awaits and len(offers) * OTHERS_PER_ABSENT <= rows - len(offers):
            taken = [o for o in chosen if o.sequence.reads_always or o.net > _SIT_OUT]
        else:
            taken = chosen if chosen and self._pay(chosen, rows, awaits) else []
        if chosen and not taken:  # what is known may be old: now and then they are tried
            self._refused += 1
            taken = chosen if self._refused % _TRY_EVERY >= _TRY_EVERY - _TRIES else []
        taken = [*told, *taken]
        kept = {offer.sequence.key for offer in taken}
        for offer in offers:
            if offer.sequence.key not in kept:
                self._wait(offer.sequence, False)
        return taken

    def _pay(self, offers: list[_Offer], rows: int, awaits: bool) -> bool:
        """Whether a step with these drafts gives more tokens a second than one without.

        awaits: steps are awaited in any case. Where a sequence's token is pending, the step before
        has to be awaited too.
        """
        gain = sum(offer.gain for offer in offers)
        plain, drafted = (rows, awaits), (rows + sum(offer.count for offer in offers), True)
        tokens, steps = rows + gain, self.pace.ratio(plain, drafted)
        if not awaits and any(offer.pending for offer in offers):
            tokens, steps = tokens + rows, steps + self.pace.ratio(plain, (rows, True))
        return tokens > _GAIN * rows * steps

    def _look(self, drafter: Drafter, tokens: Rows[int], end: int) -> int:
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

    def _propose(self, offer: _Offer, most: int) -> int:
        """Add an offer's drafts, at most so many; how many."""
        sequence, drafter = offer.sequence, offer.drafter
        if self.instead is not None:
            sequence.drafter = None
            return add_drafts(sequence, self.instead(sequence, most)[:most]) if most > 0 else 0
        drafts: Rows[int] = ()
        try:
            drafts = drafter.next(most)[:most] if most > 0 else ()
        except Exception as error:
            self._switch_off(drafter, f"raised {type(error).__name__}: {error}")
        sequence.drafter, sequence.trust = drafter, offer.trust
        added = add_drafts(sequence, drafts)
        self._wait(sequence, added > 0 or drafter.name == DRAFTS)
        return added

    def _wait(self, sequence: Sequence, waits: bool) -> None:
        """Let a sequence await results, to carry drafts, or run ahead again."""
        sequence.wait_for_drafts(waits)
        if waits:
            self._active[sequence.key] = sequence
        else:
            self._active.pop(sequence.key, None)

    def _switch_off(self, drafter: Drafter, why: str) -> None:
        self._off.add(drafter.name)
        _log.warning("drafter %s %s: it is switched off, answers go on", drafter.name, why)


def sent_by_client(sequence: Sequence) -> bool:
    """Whether the drafts of a sequence's row are tokens that its request brought."""
    return sequence.drafter is not None and sequence.drafter.name in OF_REQUESTS


def _decodes(sequence: Sequence) -> bool:
    return sequence.remaining == 1 and len(sequence.tokens) > sequence.prompt_length


def _best_count(chance: float, rows: int) -> int:
    """The drafts of a row beside `rows` whose last is still worth its position."""
    cost = POSITION * rows
    if chance >= 1.0:
        return MAX_STEP_DRAFTS
    if cost >= chance:
        return 0
    return int(math.log(cost) / math.log(chance))
