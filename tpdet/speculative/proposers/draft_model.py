"""Drafts of a second, small model: it always has some, and is asked for many sequences at once."""

from collections.abc import Sequence as Rows

from tpdet.speculative.proposal import DRAFT_MODEL

_TRUST = 16  # for a start; how often it is right is learned of all sequences


class OfModel:
    """Says that the draft model may be asked for a sequence; the model itself has the drafts."""

    name = DRAFT_MODEL
    is_spent = False

    def look(self, tokens: Rows[int], end: int) -> int:
        """It always has something."""
        return _TRUST

    def next(self, most: int) -> Rows[int]:
        """Nothing for one sequence alone (`Drafting.model`)."""
        return ()
