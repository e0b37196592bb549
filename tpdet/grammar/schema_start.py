"""Where a schema begins in an output: at its first token, or behind the end of its reasoning."""

from collections.abc import Sequence


class SchemaStart:
    """Finds the place in one choice's tokens, which grow, and of which drafts are taken back.

    No ids: the schema holds from the output's first token. One id: behind the first such token.
    Several: they begin with the id that opens reasoning. An output that begins otherwise follows
    the schema from its first token. Else the schema holds behind the first last id that comes after
    all other ids in a row; any tokens may stand between the row and the last id.
    """

    def __init__(self, ids: tuple[int, ...], first: int) -> None:
        """ids: `SamplingParams.json_schema_after`; first: where the output begins."""
        self._row, self._last = ids[:-1], ids[-1:]
        self._first = self._seen = first  # tokens before `_seen` were looked at
        self._row_end: int | None = None if self._row else first
        self._begin: int | None = None if ids else first

    def begin(self, tokens: Sequence[int], position: int) -> int | None:
        """Where the schema begins that holds at `position` of prompt and output; None for none."""
        if self._row and position == self._first:
            return position
        while self._begin is None and self._seen < position:
            self._look(tokens)
        return self._begin if self._begin is None or self._begin <= position else None

    def opening(self, position: int) -> int | None:
        """The id that may open reasoning at `position`, beside what the schema allows there."""
        return self._row[0] if self._row and position == self._first else None

    def take_back(self, position: int) -> None:
        """Forget the tokens from `position` on: others may come."""
        if position >= self._seen:
            return
        self._seen, self._begin = position, None
        if self._row and self._row_end is not None and self._row_end > position:
            self._row_end = None

    def _look(self, tokens: Sequence[int]) -> None:
        place, row = self._seen, self._row
        self._seen += 1
        if row and place == self._first and tokens[place] != row[0]:
            self._begin = place
        elif self._row_end is None:
            start = self._seen - len(row)
            if tokens[place] != row[-1] or start < self._first:
                return
            if tuple(tokens[start : self._seen]) == row:
                self._row_end = self._seen
        elif tokens[place] == self._last[0]:
            self._begin = self._seen
