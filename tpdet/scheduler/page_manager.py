"""The page manager: which sequence holds which KV page, and the events that report each change.

A model with linear-attention layers has slots of states beside the pages (`state_slots.py`).

It couples the allocator and the prefix cache with rank 0's own version table. Each change is
recorded as an event; the next plan carries the events to every rank, in order. The table is always
the state after those events.

A page belongs to the sequence that it was given to until it is freed or shared. A shared page
belongs to no sequence (its owner is SHARED), and no row may write it. It is freed when it has no
reader and another sequence needs a page.
"""

from collections import abc

from tpdet.cache.pages import PageAllocator
from tpdet.cache.versions import ALL_PAGES, NOBODY, SHARED, VersionTable
from tpdet.control.plan import ALLOCATE, EVICT, NAN, RELOAD, SHARE, PageEvent
from tpdet.errors import IntegrityError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.prefixes import Prefixes
from tpdet.scheduler.sequence import Sequence, pages_for
from tpdet.scheduler.state_slots import StateSlots


class PageManager:
    """The KV pages of all sequences, and their slots of states where a model has these.

    `prefix_identity` names the weights and the contract under which pages are shared; None shares
    none.
    """

    def __init__(
        self,
        num_pages: int,
        prefix_identity: bytes | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.table = VersionTable(num_pages)
        self.states = states
        self.prefixes = Prefixes(prefix_identity, None if states is None else states.forget)
        self._events: list[PageEvent] = []

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache."""
        return self.allocator.num_pages

    @property
    def free_count(self) -> int:
        """Pages that no sequence holds: the free ones, and the cached ones without a reader."""
        return self.allocator.free_count + self.prefixes.index.idle_count

    def fits(self, sequence: Sequence) -> bool:
        """Whether enough pages are free for every known token of a running `sequence`."""
        return sequence.missing_pages <= self.free_count

    def grow(self, sequence: Sequence) -> None:
        """Give `sequence` the pages that its known tokens still lack; check `fits` first."""
        for _ in range(sequence.missing_pages):
            if not self.allocator.free_count:
                self._free(self.prefixes.index.evict(), SHARED)
            page = self.allocator.allocate()
            self._record(ALLOCATE, page, sequence.version_id)
            self._hold(sequence, page)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting `sequence` pages for its known tokens, cached ones first.

        Positions of cached pages count as computed. Returns False and changes nothing when pages
        are short, or when a running sequence is computing the very page that is needed next. With
        states, cached pages end at a snapshot, which is also what is waited for.
        """
        matched = cached = self.prefixes.find(sequence)
        if self.states is not None:
            if not self.states.has_room:
                return False
            cached = self.states.usable(matched)
        if self._must_wait(sequence, len(cached), len(matched)):
            return False
        index = self.prefixes.index
        idle = sum(index.is_idle(entry.page) for entry in cached)
        if pages_for(len(sequence.tokens)) - len(cached) > self.free_count - idle:
            return False
        for entry in cached:
            index.take(entry.page)
            self._hold(sequence, entry.page)
        self.prefixes.admitted(sequence, cached)
        sequence.computed = len(cached) * PAGE_TOKENS
        if self.states is not None:
            shared = len(matched) if self.prefixes.shares else None
            self.states.begin(sequence, cached, shared)
        self.grow(sequence)
        return True

    def share(self, sequence: Sequence, end: int) -> None:
        """Let other sequences read the full pages of `sequence` before position `end`.

        Call it once logits that depend on all these pages are known to be finite.
        """
        for page, stale in self.prefixes.share(sequence, end):
            if stale is not None:
                self._free(stale, SHARED)
            self._record(SHARE, page, sequence.version_id)
        self.take_snapshots((sequence,))  # who waits for it begins with the next step

    def take_snapshots(self, sequences: abc.Iterable[Sequence]) -> None:
        """Take snapshots of the states of sequences where these are due, before their next rows."""
        if self.states is None:
            return
        for sequence in sequences:
            self.states.take(sequence)
            self.states.settle(sequence, self.prefixes.index.holds)

    def leave_snapshots(
        self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]
    ) -> bytes:
        """The `PlanRows.snapshots` of rows that compute the next `counts[i]` of `sequences[i]`."""
        return b"" if self.states is None else self.states.leave_behind(sequences, counts)

    def release(self, sequence: Sequence) -> None:
        """Take every page of `sequence` back, the last position first; shared ones stay cached.

        The pages of a poisoned sequence do not stay: each is marked NAN and evicted, a page with
        other readers when the last of them is done.
        """
        index = self.prefixes.index
        if self.states is not None:
            shared = sequence.prefix.offered >= sequence.computed // PAGE_TOKENS
            self.take_snapshots([sequence] if shared and not sequence.poisoned else ())
            self.states.release(sequence)
        for page in reversed(sequence.pages):
            shared = index.is_shared(page)
            if shared and sequence.poisoned:
                index.drop(page)
            if not shared or index.give(page):
                self._free(page, SHARED if shared else sequence.version_id, sequence.poisoned)
        self.prefixes.released(sequence)
        sequence.let_go()

    def forget_prefixes(self) -> None:
        """Evict every cached page without a reader."""
        while self.prefixes.index.idle_count:
            self._free(self.prefixes.index.evict(), SHARED)

    def reload(self, prefix_identity: bytes | None, kept: abc.Sequence[Sequence] = ()) -> None:
        """Empty the prefix cache for other weights, and bump the version of every page.

        kept: sequences that keep their pages; nobody else will read these, and none is bumped.
        Raises IntegrityError while another sequence holds a page: drain first.
        """
        self.forget_prefixes()
        if kept:
            self.prefixes.keep(kept, prefix_identity)
            return
        event = PageEvent(RELOAD, ALL_PAGES, NOBODY)
        self.table.apply((event,))
        self._events.append(event)
        self.prefixes.restart(prefix_identity)

    @property
    def has_events(self) -> bool:
        """Whether pages, or slots of states, changed since the last plan."""
        return bool(self._events) or (self.states is not None and self.states.has_events)

    def take_events(self) -> tuple[PageEvent, ...]:
        """The events since the last plan, in the order they happened."""
        events, self._events = tuple(self._events), []
        return events

    def check_integrity(self, sequences: abc.Sequence[Sequence]) -> None:
        """Refuse (IntegrityError) unless `sequences` hold exactly the pages that are in use.

        A shared page may have several holders, or be kept by the prefix cache without any; any
        other page in use has one holder, its owner.
        """
        self.allocator.check_integrity()
        index = self.prefixes.index
        holders: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            for page, version in zip(sequence.pages, sequence.versions, strict=True):
                holders.setdefault(page, []).append(sequence)
                if self.table.version(page) != version:
                    raise IntegrityError(
                        f"{sequence.key} holds page {page} at version {version}, the table has "
                        f"{self.table.version(page)}"
                    )
                if len(holders[page]) > 1 and not index.is_shared(page):
                    first, second = holders[page]
                    raise IntegrityError(f"page {page} is held by {first.key} and by {second.key}")
        if self.states is not None:
            self.states.check_integrity(sequences, index.holds)
        index.check_integrity({page: len(readers) for page, readers in holders.items()})
        for page in range(self.allocator.num_pages):
            owner = NOBODY
            if index.is_shared(page):
                owner = SHARED
            elif page in holders:
                owner = holders[page][0].version_id
            used = self.allocator.is_used(page)
            if self.table.owner(page) != owner or used != (owner != NOBODY):
                raise IntegrityError(
                    f"page {page} is held by {owner:#018x}; the version table has "
                    f"{self.table.owner(page):#018x}, the allocator {'used' if used else 'free'}"
                )

    def _must_wait(self, sequence: Sequence, cached: int, matched: int) -> bool:
        if self.states is None:
            return self.prefixes.must_wait(sequence, cached)
        end, other = self.prefixes.being_computed(sequence, cached, matched)
        if other is None or other.states is None:
            return False
        after, last = cached * PAGE_TOKENS, end * PAGE_TOKENS
        return other.states.will_have(other.computed, after, last)

    def _hold(self, sequence: Sequence, page: int) -> None:
        sequence.hold(page, self.table.version(page))

    def _free(self, page: int, owner: int, poisoned: bool = False) -> None:
        if poisoned:
            self._record(NAN, page, owner)
        self._record(EVICT, page, owner)
        self.allocator.release(page)

    def _record(self, kind: int, page: int, owner: int) -> None:
        event = PageEvent(kind, page, owner)
        self.table.apply((event,))
        self._events.append(event)
