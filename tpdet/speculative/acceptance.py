"""How likely a draft is right, by its drafter and by how far that could be trusted.

It begins with an assumption that counts as much as a few drafts. What was seen is added to it and
fades with the steps that pass, so that a drafter that was unlucky is asked again.
"""

from collections import Counter
from dataclasses import dataclass

from tpdet.speculative.proposal import DRAFT_MODEL

_FIRST = (0.5, 0.7, 0.85, 0.95, 0.98, 0.99)  # of trust 4 to 7, 8 to 15, ... tokens
_MOST = 0.999
_SURE = 4.0  # cases that an assumption counts for
_HALF, _CASES = 512, 256.0  # steps after which cases count half, and how many count
_UNLIKELY = 0.0025  # rows without a right draft that are as unlikely let a drafter rest
_STRANGE = 0.1  # how likely a drafter is good for a sequence, until it was right there
_BELIEVED = 0.8  # of a chance, at most, in saying how unlikely rows are
_REST, _LONGEST_REST = 8, 256  # steps; twice as many each time, until it is right
_ROWS_OF_UNKNOWN, _REST_OF_UNKNOWN = 3, 64  # of a drafter that was not right anywhere, yet
PROOF = 9
"""Right drafts from which on those of a draft model are verified."""


@dataclass(slots=True)
class Tally:
    """Of how many cases something was so; both fade."""

    so: float = 0.0
    cases: float = 0.0
    step: int = 0

    def add(self, so: float, cases: float, step: int) -> None:
        """At a step; the latest cases count most."""
        self.fade(step)
        self.so += so
        self.cases += cases
        if self.cases > _CASES:
            self.so *= _CASES / self.cases
            self.cases = _CASES

    def fade(self, step: int) -> None:
        """Let the steps pass until `step`."""
        if step > self.step:
            left = 0.5 ** ((step - self.step) / _HALF)
            self.so *= left
            self.cases *= left
            self.step = step


@dataclass(slots=True)
class Luck:
    """Of one sequence with a drafter: it rests before step `until` if it seems to be never right.

    missed: its latest rows, none of which had a right draft.
    """

    missed: int = 0
    rest: int = 0
    until: int = 0
    was_right: bool = False

    def follow(self, accepted: int, chance: float, step: int, known: bool = True) -> None:
        """A row has ended, whose first draft is believed to be right with a `chance`.

        known: whether the drafter was ever right for any sequence.
        """
        if accepted:
            self.missed, self.rest, self.was_right = 0, 0, True
            return
        self.missed += 1
        likely = (1.0 - min(chance, _BELIEVED)) ** self.missed
        if not self.was_right:
            likely *= _STRANGE
        if likely < _UNLIKELY if known else self.missed >= _ROWS_OF_UNKNOWN:
            least = _REST if known else _REST_OF_UNKNOWN
            self.rest = min(max(2 * self.rest, least), _LONGEST_REST)
            self.until = step + self.rest
            self.missed *= not self.was_right


class Chances:
    """The shares of right drafts, of all sequences. Time are steps: somebody counts `step` up."""

    def __init__(self, proof: int = PROOF) -> None:
        """proof: right drafts from which on those of a draft model are verified."""
        self.step = 0
        self._proof = proof
        self._drafts: dict[tuple[str, int], Tally] = {}
        self._kept: dict[str, Tally] = {}
        self._right: Counter[str] = Counter()  # drafts of each drafter

    def of(self, name: str, trust: int) -> float:
        """That the next draft of a drafter is right."""
        level = _level(trust)
        return min(self._share(self._drafts.get((name, level)), _FIRST[level]), _MOST)

    def assumed(self, trust: int) -> float:
        """That a draft is right, as long as nothing was seen."""
        return _FIRST[_level(trust)]

    def is_proven(self, name: str) -> bool:
        """Whether a drafter's drafts may be verified: a draft model was right in trials first."""
        return name != DRAFT_MODEL or self._right[name] >= self._proof

    def learn(
        self, name: str, trust: int, accepted: int, drafted: int, luck: Luck | None = None
    ) -> None:
        """The first `accepted` of a row's `drafted` drafts were right; those behind the first wrong
        one say nothing. luck: of the row's sequence with this drafter; None: it was a trial.
        """
        self._right[name] += accepted
        if luck is not None:
            luck.follow(accepted, self.of(name, trust), self.step, self._right[name] > 0)
        tally = self._drafts.setdefault((name, _level(trust)), Tally())
        tally.add(accepted, accepted + (accepted < drafted), self.step)

    def kept(self, name: str, chance: float) -> float:
        """That a drafter still has something when a sequence has waited for its last token.

        It is assumed to be as likely as a right draft.
        """
        return self._share(self._kept.get(name), chance)

    def learn_kept(self, name: str, kept: bool) -> None:
        """A sequence has waited: whether there were drafts for it then."""
        self._kept.setdefault(name, Tally()).add(kept, 1, self.step)

    def _share(self, tally: Tally | None, assumed: float) -> float:
        if tally is None:
            return assumed
        tally.fade(self.step)
        return (_SURE * assumed + tally.so) / (_SURE + tally.cases)


def _level(trust: int) -> int:
    return min(max(trust.bit_length() - 3, 0), len(_FIRST) - 1)
