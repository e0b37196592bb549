"""A guess of an output: token ids that it may equal in long stretches, and which come next.

The output is followed as long as it equals the guess. After a difference the place is found again
by the output's last ids; the next drafts are few, and twice as many after each row that was right
to its end. Which place is found cannot change an answer.
"""

from collections.abc import Sequence as Rows

import numpy as np

from tpdet.speculative.proposal import DRAFTS

LEAST_MATCH, MOST_MATCH = 4, 32
"""Ids of the output's end that must stand in the guess for its place to be found again."""
FEW_DRAFTS = 4  # after it was
_CERTAIN = 1 << 10  # how far drafts that a client sent as its answer are trusted
_AROUND = 4096  # ids on either side of the last place, in which it is looked for


class Guess:
    """The ids that an output may have, from its first on, and where in them its end is."""

    def __init__(self, ids: Rows[int], first: int = 0, name: str = DRAFTS) -> None:
        """first: where in the sequence's tokens the output begins."""
        self.name = name
        self._ids = np.array(ids, np.int64)
        self._first = first
        self._compared = 0  # ids of the output
        self._place = 0  # of the output's next id in the guess, while it is known
        self._lost = False
        self._reach = len(ids) if name == DRAFTS else 2 * FEW_DRAFTS
        self._right = 0  # ids that were right since the place was found
        self._match = LEAST_MATCH // 2  # doubled by each loss after few right ids

    @property
    def is_spent(self) -> bool:
        """Whether the output has come to the guess's end."""
        return not self._lost and self._place >= len(self._ids)

    def look(self, tokens: Rows[int], end: int) -> int:
        """Compare what is new of the output, which ends before `end`; 0 where the place is lost."""
        if not self._follow(tokens, end):
            return 0
        return _CERTAIN if self.name == DRAFTS else max(self._match, LEAST_MATCH) + self._right

    def next(self, most: int) -> list[int]:
        """The drafts that follow, at most `most`."""
        return self._ids[self._place : self._place + min(most, self._reach)].tolist()

    def _follow(self, tokens: Rows[int], end: int) -> bool:
        first = self._first
        new = tokens[first + self._compared : end]
        self._compared = end - first
        if not self._lost:
            told = self._ids[self._place : self._place + len(new)].tolist()
            right = next((i for i, id_ in enumerate(told) if id_ != new[i]), len(told))
            self._right += right
            if right == len(told):
                self._place += right
                if right > 1:
                    self._reach = min(2 * self._reach, len(self._ids))
                return self._place < len(self._ids)
            self._lost = True
            match = LEAST_MATCH if self._right >= FEW_DRAFTS else 2 * self._match
            self._match = min(match, MOST_MATCH)
        return self._find(tokens, end)

    def _find(self, tokens: Rows[int], end: int) -> bool:
        """Look for the output's last ids in the guess, nearest to the place that was lost."""
        if end - self._first < self._match:
            return False
        low = max(0, self._place - _AROUND)
        ids = self._ids[low : self._place + _AROUND]
        starts = len(ids) - self._match
        if starts <= 0:
            return False
        same = np.ones(starts, bool)
        for place, token in enumerate(tokens[end - self._match : end]):
            same &= ids[place : place + starts] == token
        found = np.flatnonzero(same) + low + self._match
        if not len(found):
            return False
        self._place = int(found[np.abs(found - self._place).argmin()])
        self._lost, self._right, self._reach = False, 0, FEW_DRAFTS
        return True
