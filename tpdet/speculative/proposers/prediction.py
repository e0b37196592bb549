"""A predicted output: token ids that it may equal in long stretches, and which come next.

The output is followed as long as it equals the prediction. After a difference the position is
found again by the output's last ids; the next drafts are few, and twice as many after each row that
was accepted to its end. Which position is found cannot change an answer.
"""

from collections import abc

import numpy as np

from tpdet.requests.request import Request
from tpdet.speculative.proposers.proposer import DRAFTS, PREDICTION

LEAST_MATCH, MOST_MATCH = 4, 32
"""Ids of the output's end that must stand in the prediction for its position to be found again."""
FEW_DRAFTS = 4  # after it was
_CERTAIN = 1 << 10  # the match length of drafts that a client sent as its answer
_AROUND = 4096  # ids on either side of the last position, in which it is looked for


class PredictedOutput:
    """The ids that an output may have, from its first on, and where in them its end is."""

    def __init__(self, ids: abc.Sequence[int], first: int = 0, name: str = DRAFTS) -> None:
        """first: where in the sequence's tokens the output begins."""
        self.name = name
        self._ids = np.array(ids, np.int64)
        self._first = first
        self._compared = 0  # ids of the output
        self._position = 0  # of the output's next id in the prediction, while it is known
        self._lost = False
        self._reach = len(ids) if name == DRAFTS else 2 * FEW_DRAFTS
        self._right = 0  # ids that were right since the position was found
        self._match = LEAST_MATCH // 2  # doubled by each loss after few right ids

    @property
    def is_spent(self) -> bool:
        """Whether the output has come to the prediction's end."""
        return not self._lost and self._position >= len(self._ids)

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """Compare what is new of the output, which ends before `end`; 0 where it is lost."""
        if not self._follow(tokens, end):
            return 0
        return _CERTAIN if self.name == DRAFTS else max(self._match, LEAST_MATCH) + self._right

    def propose(self, most: int) -> list[int]:
        """The ids that follow, at most `most`."""
        return self._ids[self._position : self._position + min(most, self._reach)].tolist()

    def _follow(self, tokens: abc.Sequence[int], end: int) -> bool:
        first = self._first
        new = tokens[first + self._compared : end]
        self._compared = end - first
        if not self._lost:
            predicted = self._ids[self._position : self._position + len(new)].tolist()
            differences = (i for i, id_ in enumerate(predicted) if id_ != new[i])
            right = next(differences, len(predicted))
            self._right += right
            if right == len(predicted):
                self._position += right
                if right > 1:
                    self._reach = min(2 * self._reach, len(self._ids))
                return self._position < len(self._ids)
            self._lost = True
            match = LEAST_MATCH if self._right >= FEW_DRAFTS else 2 * self._match
            self._match = min(match, MOST_MATCH)
        return self._find(tokens, end)

    def _find(self, tokens: abc.Sequence[int], end: int) -> bool:
        """Look for the output's last ids in the prediction, nearest to where it was lost."""
        if end - self._first < self._match:
            return False
        low = max(0, self._position - _AROUND)
        ids = self._ids[low : self._position + _AROUND]
        starts = len(ids) - self._match
        if starts <= 0:
            return False
        same = np.ones(starts, bool)
        for offset, token in enumerate(tokens[end - self._match : end]):
            same &= ids[offset : offset + starts] == token
        positions = np.flatnonzero(same) + low + self._match
        if not len(positions):
            return False
        self._position = int(positions[np.abs(positions - self._position).argmin()])
        self._lost, self._right, self._reach = False, 0, FEW_DRAFTS
        return True


def predicted_by(request: Request, choice: int) -> PredictedOutput | None:
    """What the request itself says of a choice's output: its drafts, or its prediction."""
    first = len(request.prompt_token_ids)
    if choice < len(request.drafts) and request.drafts[choice]:
        return PredictedOutput(request.drafts[choice], first, DRAFTS)
    return PredictedOutput(request.prediction, first, PREDICTION) if request.prediction else None
