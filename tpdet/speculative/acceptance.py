"""Acceptance rates: how likely a draft is right, by its proposer and by the length of the match.

A rate begins with an assumption that counts as much as a few drafts. What was seen is added to it
and fades with the steps that pass, so that a proposer whose drafts were rejected is asked again.
"""

from collections import Counter, abc
from dataclasses import dataclass

from tpdet.scheduler.sequence import PENDING, Sequence
from tpdet.speculative.proposers.proposer import DRAFT_MODEL

_ASSUMED = (0.5, 0.7, 0.85, 0.95, 0.98, 0.99)  # for matches of 4 to 7, 8 to 15, ... tokens
_MOST = 0.999
_PRIOR_DRAFTS = 4.0  # that an assumption counts for
_MISSED = -1  # in place of a level: drafts behind a token that was another than expected
_ASSUMED_MISSED = 0.3
_HALF_LIFE, _MOST_DRAFTS = 512, 256.0  # steps after which drafts count half, and how many count
_UNLIKELY = 0.0025  # rejected rows that are as unlikely let a proposer rest
_STRANGE = 0.1  # how likely a proposer is good for a sequence, until it was right there
_BELIEVED = 0.8  # of a rate, at most, in saying how unlikely rows are
_REST, _LONGEST_REST = 8, 256  # steps; twice as many each time, until it is right
_ROWS_OF_UNKNOWN, _REST_OF_UNKNOWN = 3, 64  # of a proposer that was not right anywhere, yet
_ENOUGH, _TRUSTED = 8.0, 0.6  # drafts, and the share of right ones, by which one needs no trial
PROOF = 9
"""Accepted drafts from which on those of a draft model are verified."""


@dataclass(slots=True)
class FadingCount:
    """How many of some trials succeeded; both numbers fade."""

    successes: float = 0.0
    trials: float = 0.0
    step: int = 0

    def add(self, successes: float, trials: float, step: int) -> None:
        """Count trials of a step; the latest count most."""
        self.fade(step)
        self.successes += successes
        self.trials += trials
        if self.trials > _MOST_DRAFTS:
            self.successes *= _MOST_DRAFTS / self.trials
            self.trials = _MOST_DRAFTS

    def fade(self, step: int) -> None:
        """Let the steps pass until `step`."""
        if step > self.step:
            left = 0.5 ** ((step - self.step) / _HALF_LIFE)
            self.successes *= left
            self.trials *= left
            self.step = step


@dataclass(slots=True)
class RejectionStreak:
    """A proposer's latest rows of one sequence, all rejected; it rests before step `until`.

    is_tried: a trial of its drafts was right since it rested last.
    """

    rows: int = 0
    rest: int = 0
    until: int = 0
    was_accepted: bool = False
    is_tried: bool = False

    def follow(self, accepted: int, rate: float, step: int, known: bool = True) -> None:
        """Learn of a row, whose first draft is right with this acceptance rate.

        known: whether the proposer was ever right for any sequence.
        """
        if accepted:
            self.rows, self.rest, self.was_accepted = 0, 0, True
            return
        self.rows += 1
        likely = (1.0 - min(rate, _BELIEVED)) ** self.rows
        if not self.was_accepted:
            likely *= _STRANGE
        if likely < _UNLIKELY if known else self.rows >= _ROWS_OF_UNKNOWN:
            least = _REST if known else _REST_OF_UNKNOWN
            self.rest = min(max(2 * self.rest, least), _LONGEST_REST)
            self.until, self.is_tried = step + self.rest, False
            self.rows *= not self.was_accepted


@dataclass(frozen=True, slots=True)
class Trial:
    """The drafts of a sequence that were made where its token `first` was to come."""

    sequence: Sequence
    match_length: int
    first: int
    drafts: abc.Sequence[int]

    @property
    def is_over(self) -> bool:
        """Whether all tokens are known that its drafts stand for.

        Rates that learned of wrong drafts as soon as they are known would hear of them first.
        """
        sequence, end = self.sequence, self.first + len(self.drafts)
        known = len(sequence.tokens) - sequence.drafted
        return known > end or (known == end and sequence.tokens[end - 1] != PENDING)

    @property
    def accepted(self) -> int | None:
        """How many were right, those before the first wrong one; None where that is not known."""
        sequence = self.sequence
        end = len(sequence.tokens) - sequence.drafted
        known = sequence.tokens[self.first : min(end, self.first + len(self.drafts))]
        for index, (token, draft) in enumerate(zip(known, self.drafts, strict=False)):
            if token == PENDING:
                return None
            if token != draft:
                return index
        return len(known) if len(known) == len(self.drafts) else None


class AcceptanceRates:
    """The shares of accepted drafts, of all sequences. Time is counted in steps, in `step`."""

    def __init__(self, proof: int = PROOF) -> None:
        """proof: accepted drafts from which on those of a draft model are verified."""
        self.step = 0
        self._proof = proof
        self._drafts: dict[tuple[str, int], FadingCount] = {}
        self._available: dict[str, FadingCount] = {}
        self._accepted: Counter[str] = Counter()  # drafts of each proposer

    def rate(self, name: str, match_length: int) -> float:
        """The probability that a proposer's next draft is right."""
        level = _level(match_length)
        return min(self._share(self._drafts.get((name, level)), _ASSUMED[level]), _MOST)

    def rate_missed(self, name: str) -> float:
        """The probability that a draft is right behind another token than was expected there."""
        return min(self._share(self._drafts.get((name, _MISSED)), _ASSUMED_MISSED), _MOST)

    def learn_missed(self, name: str, accepted: int, drafted: int) -> None:
        """Learn of a row's drafts behind another token than was expected there."""
        count = self._drafts.setdefault((name, _MISSED), FadingCount())
        count.add(accepted, accepted + (accepted < drafted), self.step)

    def trusts(self, name: str, match_length: int) -> bool:
        """Whether most of a proposer's latest drafts after such matches were right."""
        count = self._drafts.get((name, _level(match_length)))
        if count is None:
            return False
        count.fade(self.step)
        return count.trials >= _ENOUGH and count.successes >= _TRUSTED * count.trials

    def assumed(self, match_length: int) -> float:
        """The probability that a draft is right, as long as nothing was seen."""
        return _ASSUMED[_level(match_length)]

    def is_proven(self, name: str) -> bool:
        """Whether a proposer's drafts may be verified: a draft model was right in trials first."""
        return name != DRAFT_MODEL or self._accepted[name] >= self._proof

    def learn(
        self,
        name: str,
        match_length: int,
        accepted: int,
        drafted: int,
        streak: RejectionStreak | None = None,
    ) -> None:
        """Learn that the first `accepted` of a row's `drafted` drafts were right.

        Those behind the first wrong one say nothing. streak: of the row's sequence with this
        proposer; None: it was a trial.
        """
        self._accepted[name] += accepted
        if streak is not None:
            rate, known = self.rate(name, match_length), self._accepted[name] > 0
            streak.follow(accepted, rate, self.step, known)
        count = self._drafts.setdefault((name, _level(match_length)), FadingCount())
        count.add(accepted, accepted + (accepted < drafted), self.step)

    def availability(self, name: str, rate: float) -> float:
        """The probability that a proposer has drafts once a sequence's last token is known.

        It is assumed to be as likely as an accepted draft, which has this rate.
        """
        return self._share(self._available.get(name), rate)

    def learn_availability(self, name: str, available: bool) -> None:
        """Learn whether there were drafts for a sequence that had waited for its last token."""
        self._available.setdefault(name, FadingCount()).add(available, 1, self.step)

    def _share(self, count: FadingCount | None, assumed: float) -> float:
        if count is None:
            return assumed
        count.fade(self.step)
        return (_PRIOR_DRAFTS * assumed + count.successes) / (_PRIOR_DRAFTS + count.trials)


def _level(match_length: int) -> int:
    return min(max(match_length.bit_length() - 3, 0), len(_ASSUMED) - 1)
