"""Drafts that somebody dictates, whether or not they pay: for verification and measurements."""

from collections import abc
from functools import partial

from tpdet.control.row_messages import RowKey
from tpdet.requests.request import Request
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import PENDING, Sequence
from tpdet.scheduler.speculator import Speculator
from tpdet.speculative.draft_rows import decodes, fill_rows, step_room
from tpdet.speculative.proposers.prediction import predicted_by

Dictate = abc.Callable[[Sequence, int], abc.Sequence[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""


class FixedSpeculator(Speculator):
    """Drafts by one function for every sequence whose request has drafts or a prediction."""

    def __init__(self, dictate: Dictate, follows: bool = False) -> None:
        """follows: rows may follow drafts that a step still verifies; the function is asked what
        comes behind the token after those.
        """
        super().__init__()
        self._dictate, self._follows = dictate, follows
        self._sequences: dict[RowKey, Sequence] = {}

    def admit(self, request: Request, sequences: abc.Sequence[Sequence]) -> None:
        """As `Speculator.admit`."""
        for sequence in sequences:
            if predicted_by(request, sequence.choice) is not None:
                sequence.wait_for_drafts(not self._follows)
                self._sequences[sequence.key] = sequence

    def propose(self, running: SequenceQueue, counts: dict[RowKey, int], budget: int) -> None:
        """As `Speculator.propose`."""
        if self.paused or not counts or (budget := step_room(counts, budget)) <= 0:
            return
        ready = [
            sequence
            for key, sequence in sorted(self._sequences.items())
            if key in counts and decodes(sequence)
            if self._follows or sequence.tokens[-1] != PENDING
        ]
        fill_rows([(it, partial(self._dictate, it)) for it in ready], counts, budget)

    def stop(self, sequence: Sequence) -> None:
        """As `Speculator.stop`."""
        sequence.wait_for_drafts(False)
        self._sequences.pop(sequence.key, None)

    def finish(self, sequence: Sequence) -> None:
        """As `Speculator.finish`."""
        self._sequences.pop(sequence.key, None)

    def close(self) -> None:
        """As `Speculator.close`."""
        for sequence in list(self._sequences.values()):
            self.stop(sequence)
