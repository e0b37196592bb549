"""Drafts that a schema forces: the text that alone can follow, cut into tokens."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from tpdet.speculative.proposal import SCHEMA

_TRUST = 32  # the text is sure, but the model may cut it otherwise


class Forced:
    """The text that a sequence's schema forces after what has followed it so far."""

    name = SCHEMA
    is_spent = False

    def __init__(
        self,
        forced: Callable[[Rows[int]], list[int]],
        begin: Callable[[Rows[int], int], int | None],
    ) -> None:
        """forced: the ids of the text that must follow ids of the schema's text.

        begin: where this text begins in tokens[:end]; None where no schema holds.
        """
        self._forced, self._begin = forced, begin
        self._ids: list[int] = []

    def look(self, tokens: Rows[int], end: int) -> int:
        """Whether any text is forced after tokens[:end]."""
        begin = self._begin(tokens, end)
        self._ids = [] if begin is None else self._forced(tokens[begin:end])
        return _TRUST if self._ids else 0

    def next(self, most: int) -> list[int]:
        """The ids of the forced text."""
        return self._ids[:most]
