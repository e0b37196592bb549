"""What sequences could carry, and whether that is expected to give more tokens a second."""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.drafters.drafter import DRAFTS, Drafter
from tpdet.drafters.pace import Pace
from tpdet.scheduler.sequence import Sequence

OTHERS_PER_ABSENT = 10
"""Least other running sequences for each that sits out a step which is planned ahead."""
_GAIN = 1.02  # what drafts must be expected to gain
_SIT_OUT = 1.1  # tokens that a row must gain if its sequence sits out the next step for it


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter with something for a sequence; each token is right with a `chance`.

    pending: the sequence's last token is not known, so it would have to wait first.
    """

    sequence: Sequence
    drafter: Drafter
    trust: int
    chance: float
    pending: bool

    @property
    def is_told(self) -> bool:
        """Whether a client sent the drafts as its answer: they are verified in any case."""
        return self.drafter.name == DRAFTS

    def best_count(self, cost: float) -> int:
        """The drafts whose last is still worth its `cost`, in tokens; at least one."""
        if self.is_told:
            return MAX_STEP_DRAFTS
        if cost >= self.chance:
            return 1
        return min(int(math.log(cost) / math.log(self.chance)), MAX_STEP_DRAFTS)


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts for a sequence. `gain` of them may be right; net: less the cost of their positions."""

    found: Found
    drafts: Rows[int]
    gain: float
    net: float

    @classmethod
    def of(cls, found: Found, drafts: Rows[int], cost: float) -> "Offer":
        """cost: of a position, in tokens."""
        chance, count = found.chance, len(drafts)
        gain = float(count)
        if chance < 1.0:
            gain = chance * (1.0 - chance**count) / (1.0 - chance)
        if found.pending:
            gain *= chance * chance  # the tokens until then must be right
        return cls(found, drafts, gain, gain - cost * count)


def worthwhile(offers: Rows[Offer], rows: int, always: int, pace: Pace) -> list[Offer]:
    """The offers that are expected to pay in a step of `rows` rows, `always` of which await results
    in any case.

    Few among many sit out the next step for their drafts. Otherwise all rows wait with them.
    """
    hopeful = [offer for offer in offers if offer.net > 0.0]
    awaits = not pace.runs_ahead or always * OTHERS_PER_ABSENT > rows - always
    if not awaits and len(hopeful) * OTHERS_PER_ABSENT <= rows - len(hopeful):
        return [o for o in hopeful if o.found.sequence.reads_always or o.net > _SIT_OUT]
    return hopeful if hopeful and _pay(hopeful, rows, awaits, pace) else []


def _pay(offers: Rows[Offer], rows: int, awaits: bool, pace: Pace) -> bool:
    """Whether a step with these drafts gives more tokens a second than one without.

    awaits: steps are awaited in any case. Where a sequence's token is pending, the step before has
    to be awaited too.
    """
    plain = rows, awaits
    drafted = rows + sum(len(offer.drafts) for offer in offers), True
    tokens = rows + sum(offer.gain for offer in offers)
    steps = pace.ratio(plain, drafted)
    if not awaits and any(offer.found.pending for offer in offers):
        tokens, steps = tokens + rows, steps + pace.ratio(plain, (rows, True))
    return tokens > _GAIN * rows * steps
