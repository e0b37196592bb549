"""A queue of sequences in the total order: by admission number, then by choice."""

from bisect import bisect_left, insort
from collections import abc
from operator import attrgetter

from tpdet.control.row_messages import RowKey
from tpdet.errors import IntegrityError
from tpdet.scheduler.sequence import Sequence

_key = attrgetter("key")


class SequenceQueue:
    """Sequences, always sorted by their key, whatever the order they were added in."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> abc.Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def having(self, keys: abc.Container[RowKey]) -> list[Sequence]:
        """The sequences whose key is among `keys`, in the total order."""
        return [sequence for sequence in self._sequences if sequence.key in keys]

    def lacking_pages(self) -> list[Sequence]:
        """The sequences whose pages do not hold all their tokens, in the total order.

        Nor the token behind drafts that a pending step verifies.
        """
        return [s for s in self._sequences if len(s.tokens) + (s.drafted > 0) > s.room]

    def put(self, sequence: Sequence) -> None:
        """Insert `sequence` by its key; one with the smallest key becomes the head."""
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> bool:
        """Take `sequence` out; False when it is not in this queue."""
        at = bisect_left(self._sequences, sequence.key, key=_key)
        if at < len(self._sequences) and self._sequences[at] is sequence:
            del self._sequences[at]
            return True
        return False

    def check_integrity(self, name: str) -> None:
        """Refuse (IntegrityError) a queue out of order, or one that holds a finished sequence."""
        before = (-1, -1)
        for sequence in self._sequences:
            if sequence.key <= before:
                raise IntegrityError(f"{name}: {sequence.key} stands after {before}")
            if sequence.finished:
                raise IntegrityError(f"{name}: {sequence.key} is finished")
            before = sequence.key
