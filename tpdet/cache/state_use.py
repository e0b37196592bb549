"""How one running sequence uses its slot of linear-attention states, and where it is copied."""

import sys
from bisect import insort
from collections import abc
from dataclasses import dataclass, field

from tpdet.cache.prefix import CachedPage
from tpdet.cache.state_table import chunk_after, keeps_by_pass
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

NO_SNAPSHOTS = sys.maxsize  # as `taken`


@dataclass(slots=True, eq=False)
class StateUse:
    """A sequence's slot, and its snapshots.

    standing: the chunk at which the slot stands after the steps that are planned. snapshot_ends:
    page ends of the prompt at which a snapshot is taken, ascending; from position `decodes_from` on
    one is taken at every page end. taken: the last page end that was looked at. pending: snapshots
    of pages that are not in the prefix cache yet, by their page end. decoded: cached pages whose
    snapshots it made while it decoded, oldest first.
    """

    slot: int
    standing: int
    decodes_from: int
    taken: int = NO_SNAPSHOTS
    snapshot_ends: list[int] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)
    decoded: list[CachedPage] = field(default_factory=list)

    def follow(self, start: int, end: int, drafts: bool) -> None:
        """A step computes positions [start, end)."""
        self.standing = chunk_after(start, end, drafts)

    def passed(self, start: int, end: int) -> list[int]:
        """The page ends of which a row of positions [start, end) leaves snapshots behind, once."""
        ends = [
            position
            for position in self.snapshot_ends
            if max(start, self.taken) < position and keeps_by_pass(position, end)
        ]
        self.taken = max([self.taken, *ends])
        return ends

    def due(self, computed: int) -> int | None:
        """The page end at which a snapshot is due, once, when `computed` positions are."""
        end = computed // PAGE_TOKENS * PAGE_TOKENS
        if end <= self.taken:
            return None
        self.taken = end
        if end < self.decodes_from and end not in self.snapshot_ends:
            return None
        near = computed - end <= CHUNK_TOKENS
        return end if near and end // CHUNK_TOKENS - self.standing in (0, 1) else None

    def will_have(self, computed: int, after: int, end: int) -> bool:
        """Whether there will be a snapshot in (after, end]; where possible one at `end` is added.

        computed: positions of the sequence so far.
        """
        ahead = [position for position in self.snapshot_ends if position > self.taken]
        if any(after < position <= end for position in (*ahead, *self.pending)):
            return True
        if computed > end or end <= self.taken:
            return False
        insort(self.snapshot_ends, end)
        return True


def newest(entries: abc.Sequence[CachedPage], having: abc.Container[CachedPage]) -> int:
    """How many of these pages of one prefix lead up to the last one that has a snapshot."""
    return next((n for n in range(len(entries), 0, -1) if entries[n - 1] in having), 0)
