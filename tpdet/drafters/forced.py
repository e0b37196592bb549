"""Drafts that a schema forces: the text that alone can follow, cut into tokens."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from tpdet.drafters.drafter import SCHEMA

_TRUST = 32  # the text is sure, but the model may cut it otherwise


class Forced:
    """The text that a sequence's schema forces after its output."""

    name = SCHEMA
    is_spent = False

    def __init__(self, forced: Callable[[Rows[int]], list[int]], first: int) -> None:
        """forced: the ids of the text that must follow an output, which begins at `first`."""
        self._forced, self._first = forced, first
        self._ids: list[int] = []

    def look(self, tokens: Rows[int], end: int) -> int:
        """Whether any text is forced after tokens[:end]."""
        self._ids = self._forced(tokens[self._first : end])
        return _TRUST if self._ids else 0

    def next(self, most: int) -> list[int]:
        """The ids of the forced text."""
        return self._ids[:most]
