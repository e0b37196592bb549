"""n-gram drafts: the last tokens of a sequence stood in it before, so the same may follow again.

Every run of four tokens is indexed with the position behind it: a prompt once, for all choices of
its request, and the output as it grows. A position that matched is followed while the tokens agree.
"""

from collections import abc

import numpy as np

from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.speculative.proposers.proposer import NGRAM

GRAM = 4
"""Tokens of an indexed run, and of the shortest match."""
_LONGEST = 64  # tokens of a match that are compared when it is found
_POSITIONS = 4  # the latest positions of a run, of which the longest match counts
MOST_DRAFTS = SHORT_TOKENS - 1
"""Of a row."""
_MOST_IDS_SAID = 2 * MOST_DRAFTS + 1  # those before a row's drafts that are verified meanwhile, too
_MOST_IDS = 32_768  # of a prompt's end that are indexed, in about 5 ms
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class PromptIndex:
    """Where each run of four tokens of a prompt's end stands; made at the first question."""

    def __init__(self, ids: abc.Sequence[int]) -> None:
        self.length = len(ids)
        self._ids: abc.Sequence[int] | None = ids[-_MOST_IDS:]
        self._keys = np.empty(0, np.uint64)
        self._positions = np.empty(0, np.int64)

    def after(self, gram: abc.Sequence[int]) -> list[int]:
        """The latest positions behind `gram`, at which another token of the prompt stands."""
        if self._ids is not None:
            self._index(self._ids)
            self._ids = None
        hashed = 0
        for token in gram:
            hashed = (hashed * _MULTIPLIER + token) & _MASK
        key = np.uint64(hashed)
        low = int(self._keys.searchsorted(key))
        if low == len(self._keys) or self._keys[low] != key:  # the usual case
            return []
        high = int(self._keys.searchsorted(key, "right"))
        latest: list[int] = self._positions[max(low, high - _POSITIONS) : high].tolist()
        return latest[::-1]

    def _index(self, ids: abc.Sequence[int]) -> None:
        count = len(ids) - GRAM
        if count <= 0:
            return
        tokens = np.array(ids, np.uint64)
        keys = np.zeros(count, np.uint64)
        for offset in range(GRAM):
            keys = keys * np.uint64(_MULTIPLIER) + tokens[offset : offset + count]
        order = keys.argsort(kind="stable")
        self._keys, self._positions = keys[order], order + (GRAM + self.length - len(ids))


class Ngram:
    """The positions in one sequence's own tokens whose tokens may be its next ones."""

    name = NGRAM
    is_spent = False

    def __init__(self, prompt: PromptIndex) -> None:
        self._prompt = prompt
        self._after: dict[int, list[int]] = {}  # hash of a run -> the positions behind it
        self._indexed = prompt.length - 1  # the last position behind an indexed run
        self._known = 0  # tokens of the last look
        self._tokens: abc.Sequence[int] = ()
        self._position = 0  # of the token that may come next; 0: none is known
        self._matched = 0  # tokens before it that are the sequence's last

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """Index what is new; the length of the match, 0 without one."""
        new = end - self._known
        if self._position:
            before, self._position = self._position, self._position + new
            if tokens[before : before + new] == tokens[self._known : end]:
                self._matched += new
            else:
                self._position = 0
        for position in range(max(self._indexed + 1, GRAM), end):
            self._after.setdefault(_hash(tokens, position), []).append(position)
        self._indexed = end - 1
        self._known, self._tokens = end, tokens
        if not self._position:
            self._find(tokens, end)
        return self._matched if self._position else 0

    def propose(self, most: int) -> list[int]:
        """The tokens at the position; one near the end repeats what lies between."""
        most = min(most, _MOST_IDS_SAID)
        drafts = list(self._tokens[self._position : min(self._position + most, self._known)])
        return (drafts * -(-most // len(drafts)))[:most]

    def _find(self, tokens: abc.Sequence[int], end: int) -> None:
        if end <= GRAM:
            return
        self._matched = 0
        gram = tokens[end - GRAM : end]
        for position in self._positions(tokens, end):
            length = GRAM - 1  # runs with the same hash may differ
            while length < _LONGEST and tokens[position - 1 - length] == tokens[end - 1 - length]:
                length += 1
                if length == position:
                    break
            if length > self._matched and tokens[position - GRAM : position] == gram:
                self._position, self._matched = position, length

    def _positions(self, tokens: abc.Sequence[int], end: int) -> abc.Iterator[int]:
        """The positions behind the last run, the latest first."""
        yield from reversed(self._after.get(_hash(tokens, end), ())[-_POSITIONS:])
        yield from self._prompt.after(tokens[end - GRAM : end])


def _hash(tokens: abc.Sequence[int], position: int) -> int:
    return hash(tuple(tokens[position - GRAM : position]))
