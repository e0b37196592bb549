"""The page ledger: who holds which page, and the events that tell every rank so.

It couples the allocator with rank 0's own version table. Events are recorded as they happen and
leave with the next plan, in that order; the table is always the state after those events.
"""

from collections.abc import Iterable

from tpdet.cache.pages import PageAllocator
from tpdet.cache.versions import NOBODY, VersionTable
from tpdet.errors import IntegrityError
from tpdet.plan import ALLOCATE, EVICT, NAN, PageEvent
from tpdet.scheduler.sequence import Sequence


class PageLedger:
    """Pages of all sequences."""

    def __init__(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.table = VersionTable(num_pages)
        self._events: list[PageEvent] = []

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache."""
        return self.pages.num_pages

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return self.pages.free_count

    def fits(self, sequence: Sequence) -> bool:
        """Whether enough pages are free for every known token of `sequence`."""
        return sequence.missing_pages <= self.pages.free_count

    def grow(self, sequence: Sequence) -> None:
        """Give `sequence` the pages its known tokens still lack; check `fits` first."""
        for _ in range(sequence.missing_pages):
            page = self.pages.allocate()
            self._record(ALLOCATE, page, sequence)
            sequence.pages += (page,)
            sequence.versions += (self.table.version(page),)

    def release(self, sequence: Sequence) -> None:
        """Take every page of `sequence` back, in the order of its positions.

        A poisoned sequence's pages are marked NAN before they are evicted.
        """
        for page in sequence.pages:
            if sequence.poisoned:
                self._record(NAN, page, sequence)
            self._record(EVICT, page, sequence)
            self.pages.release(page)
        sequence.pages = sequence.versions = ()

    def take_events(self) -> tuple[PageEvent, ...]:
        """The events since the last plan, in the order they happened."""
        events, self._events = tuple(self._events), []
        return events

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Refuse (IntegrityError) unless `sequences` own exactly the used pages, once each."""
        self.pages.check_integrity()
        holders: dict[int, Sequence] = {}
        for sequence in sequences:
            for page, version in zip(sequence.pages, sequence.versions, strict=True):
                if page in holders:
                    raise IntegrityError(
                        f"page {page} is held by {holders[page].key} and by {sequence.key}"
                    )
                holders[page] = sequence
                if self.table.version(page) != version:
                    raise IntegrityError(
                        f"{sequence.key} holds page {page} at version {version}, the table has "
                        f"{self.table.version(page)}"
                    )
        for page in range(self.pages.num_pages):
            holder = holders.get(page)
            owner = NOBODY if holder is None else holder.version_id
            if self.table.owner(page) != owner or self.pages.is_used(page) != (holder is not None):
                raise IntegrityError(
                    f"page {page} is held by {owner:#018x}; the version table has "
                    f"{self.table.owner(page):#018x}, the allocator "
                    f"{'used' if self.pages.is_used(page) else 'free'}"
                )

    def _record(self, kind: int, page: int, sequence: Sequence) -> None:
        event = PageEvent(kind, page, sequence.version_id)
        self.table.apply((event,))
        self._events.append(event)
