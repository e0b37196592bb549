"""n-gram drafts: the last tokens of a sequence stood in it before, so the same may follow again.

Every run of four tokens is indexed with the place behind it: a prompt once, for all choices of its
request, and the output as it grows. A place that was found is followed while the tokens agree.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows

import numpy as np

from tpdet.speculative.proposal import NGRAM

GRAM = 4
"""Tokens of an indexed run, and of the shortest match."""
_LONGEST = 64  # tokens of a match that are compared when it is found
_PLACES = 4  # the latest places of a run, of which the longest match counts
_MOST_DRAFTS = 15
_MOST_IDS = 32_768  # of a prompt's end that are indexed, in about 5 ms
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class PromptPlaces:
    """Where each run of four tokens of a prompt's end stands; made at the first question."""

    def __init__(self, ids: Rows[int]) -> None:
        self.length = len(ids)
        self._ids: Rows[int] | None = ids[-_MOST_IDS:]
        self._keys = np.empty(0, np.uint64)
        self._places = np.empty(0, np.int64)

    def after(self, gram: Rows[int]) -> list[int]:
        """The latest places behind `gram`, at which another token of the prompt stands."""
        if self._ids is not None:
            self._index(self._ids)
            self._ids = None
        key = 0
        for token in gram:
            key = (key * _MULTIPLIER + token) & _MASK
        sought = np.uint64(key)
        low = int(self._keys.searchsorted(sought))
        if low == len(self._keys) or self._keys[low] != sought:  # the usual case
            return []
        high = int(self._keys.searchsorted(sought, "right"))
        found: list[int] = self._places[max(low, high - _PLACES) : high].tolist()
        return found[::-1]

    def _index(self, ids: Rows[int]) -> None:
        count = len(ids) - GRAM
        if count <= 0:
            return
        tokens = np.array(ids, np.uint64)
        keys = np.zeros(count, np.uint64)
        for place in range(GRAM):
            keys = keys * np.uint64(_MULTIPLIER) + tokens[place : place + count]
        order = keys.argsort(kind="stable")
        self._keys, self._places = keys[order], order + (GRAM + self.length - len(ids))


class Ngram:
    """The places in one sequence's own tokens after which its next ones may be told."""

    name = NGRAM
    is_spent = False

    def __init__(self, prompt: PromptPlaces) -> None:
        self._prompt = prompt
        self._after: dict[int, list[int]] = {}  # hash of a run -> the places behind it
        self._indexed = prompt.length - 1  # the last place behind an indexed run
        self._known = 0  # tokens of the last look
        self._tokens: Rows[int] = ()
        self._place = 0  # of the token that may come next; 0: none is known
        self._matched = 0  # tokens before it that are the sequence's last

    def look(self, tokens: Rows[int], end: int) -> int:
        """Index what is new; the length of the match, 0 without one."""
        new = end - self._known
        if self._place:
            place, self._place = self._place, self._place + new
            if tokens[place : place + new] == tokens[self._known : end]:
                self._matched += new
            else:
                self._place = 0
        for place in range(max(self._indexed + 1, GRAM), end):
            self._after.setdefault(_hash(tokens, place), []).append(place)
        self._indexed = end - 1
        self._known, self._tokens = end, tokens
        if not self._place:
            self._find(tokens, end)
        return self._matched if self._place else 0

    def next(self, most: int) -> list[int]:
        """The tokens at the place; a place near the end repeats what lies between."""
        most = min(most, _MOST_DRAFTS)
        told = list(self._tokens[self._place : min(self._place + most, self._known)])
        return (told * -(-most // len(told)))[:most]

    def _find(self, tokens: Rows[int], end: int) -> None:
        if end <= GRAM:
            return
        self._matched = 0
        for place in self._places(tokens, end):
            length = GRAM - 1  # runs with the same hash may differ
            while length < _LONGEST and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
                if length == place:
                    break
            if length > self._matched and tokens[place - GRAM : place] == tokens[end - GRAM : end]:
                self._place, self._matched = place, length

    def _places(self, tokens: Rows[int], end: int) -> Iterator[int]:
        """The latest first."""
        yield from reversed(self._after.get(_hash(tokens, end), ())[-_PLACES:])
        yield from self._prompt.after(tokens[end - GRAM : end])


def _hash(tokens: Rows[int], place: int) -> int:
    return hash(tuple(tokens[place - GRAM : place]))
