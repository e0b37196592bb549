"""The interface of a drafter, and the names of those there are."""

from collections.abc import Sequence as Rows
from typing import Protocol

DRAFTS, PREDICTION, SCHEMA, EARLIER, NGRAM = "drafts", "prediction", "schema", "earlier", "ngram"
DRAFT_MODEL = "draft_model"
NAMES = DRAFTS, PREDICTION, EARLIER, SCHEMA, NGRAM, DRAFT_MODEL
OF_REQUESTS = DRAFTS, PREDICTION
"""The drafters whose tokens a client sent; the others are the engine's."""


class Drafter(Protocol):
    """Proposes what may follow the tokens of one sequence."""

    @property
    def name(self) -> str:
        """Which drafter it is, for statistics and the log."""

    @property
    def is_spent(self) -> bool:
        """Whether it has nothing more to propose, for good."""

    def look(self, tokens: Rows[int], end: int) -> int:
        """Take in tokens[:end], prompt and output; how far its next drafts can be trusted.

        That is a number of tokens that were as it told; 0: it proposes nothing.
        """

    def next(self, most: int) -> Rows[int]:
        """What may follow the tokens of the last `look`: at most so many ids of the vocabulary."""
