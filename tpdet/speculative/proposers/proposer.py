"""The interfaces of proposers, and the names of those there are."""

from collections import abc
from typing import Protocol

from tpdet.control.row_messages import RowKey
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.draft_model.times import DraftTimes

DRAFTS, PREDICTION, SCHEMA, EARLIER, NGRAM = "drafts", "prediction", "schema", "earlier", "ngram"
DRAFT_MODEL = "draft_model"
NAMES = DRAFTS, PREDICTION, EARLIER, SCHEMA, NGRAM, DRAFT_MODEL
OF_REQUESTS = DRAFTS, PREDICTION
"""The proposers whose tokens a client sent; the others are the engine's."""
UNTRIED = DRAFTS, PREDICTION, SCHEMA, DRAFT_MODEL
"""Those whose first drafts for a sequence are verified; others guess, and have a trial first."""
BY_TOKENS = DRAFTS, PREDICTION, EARLIER, SCHEMA, DRAFT_MODEL
"""Those whose rows are planned when the tokens before them are known: they propose long rows, or by
the last token. Others say what may follow tokens that a step still verifies."""


class Proposer(Protocol):
    """Proposes what may follow the tokens of one sequence."""

    @property
    def name(self) -> str:
        """Which proposer it is, for statistics and the log."""

    @property
    def is_spent(self) -> bool:
        """Whether it has nothing more to propose, for good."""

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """Take in tokens[:end], prompt and output; the length of the match with what it knows.

        That is how many tokens it would have proposed rightly; 0: it proposes nothing.
        """

    def propose(self, most: int) -> abc.Sequence[int]:
        """What may follow the tokens of the last `match`: at most `most` ids of the vocabulary."""


class BatchProposer(Protocol):
    """Proposes for many sequences at once, in as many steps as the longest proposal has tokens."""

    times: DraftTimes

    def captures(self, sequences: int) -> bool:
        """Whether the first drafts of so many sequences may have to capture graphs."""

    def lags(self, sequence: Sequence) -> bool:
        """Whether it must compute more of a sequence than usual before it can draft for it."""

    def draft(
        self, requests: abc.Sequence[tuple[Sequence, int]]
    ) -> abc.Sequence[abc.Sequence[int]]:
        """Drafts behind the known tokens of each sequence, at most so many."""

    def forget(self, key: RowKey) -> None:
        """Let go of what is kept for a sequence, which may be unknown."""
