"""The interface by which rows get drafts, which the engine gives an implementation."""

from collections import abc

import msgspec

from tpdet.control.row_messages import RowKey
from tpdet.requests.request import Request
from tpdet.scheduler.observers import StepObserver
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import Sequence

PLACES = 16
"""Positions of a row whose accepted drafts are counted one by one."""


class DraftCounts(msgspec.Struct):
    """Drafts of one proposer: rows with them, their tokens, and how many of those were accepted.

    `accepted_at[i]` counts the rows whose draft i, from 0, was accepted; the first 16 only.
    `switched_off` is 1 once the proposer failed or took too long: it proposes no more.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * PLACES)
    switched_off: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count a row with `drafted` drafts, of which the first `accepted` were accepted."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for index in range(min(accepted, PLACES)):
            self.accepted_at[index] += 1


class Speculator(StepObserver):
    """Proposes drafts for the rows of a step, and learns which were accepted; this one has none.

    counts: verified drafts, by proposer. paused: no row carries drafts. The scheduler calls these
    methods; as an observer a speculator hears how long the engine's steps took.
    """

    def __init__(self) -> None:
        self.counts: dict[str, DraftCounts] = {}
        self.paused = False

    def admit(self, request: Request, sequences: abc.Sequence[Sequence]) -> None:
        """Take note of a new request, of which these are the choices."""

    def propose(self, running: SequenceQueue, counts: dict[RowKey, int], budget: int) -> None:
        """Put drafts behind the tokens of decoding sequences, at most `budget` of them.

        counts: the tokens of each row of the step, which grow by the drafts.
        """

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of a row's `drafted` drafts were accepted."""

    def stop(self, sequence: Sequence) -> None:
        """Let a sequence go on without drafts, so that its next rows may be planned ahead."""

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, which has ended."""

    def forget(self, admission: int) -> None:
        """Forget outputs of requests admitted before this number: other weights gave them."""

    def close(self) -> None:
        """Let all sequences, now and later, go on without drafts."""
