"""Grammar-forced tokens: the text that alone can follow by a schema, cut into tokens."""

from collections import abc

from tpdet.speculative.proposers.proposer import SCHEMA

_MATCH_LENGTH = 32  # the text is sure, but the model may cut it otherwise


class ForcedTokens:
    """The text that a sequence's schema forces after what has followed it so far."""

    name = SCHEMA
    is_spent = False

    def __init__(
        self,
        forced: abc.Callable[[abc.Sequence[int]], list[int]],
        begin: abc.Callable[[abc.Sequence[int], int], int | None],
    ) -> None:
        """forced: the ids of the text that must follow ids of the schema's text.

        begin: where this text begins in tokens[:end]; None where no schema holds.
        """
        self._forced, self._begin = forced, begin
        self._ids: list[int] = []

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """A fixed length if any text is forced after tokens[:end], else 0."""
        begin = self._begin(tokens, end)
        self._ids = [] if begin is None else self._forced(tokens[begin:end])
        return _MATCH_LENGTH if self._ids else 0

    def propose(self, most: int) -> list[int]:
        """The ids of the forced text."""
        return self._ids[:most]
