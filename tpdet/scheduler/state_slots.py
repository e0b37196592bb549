"""The slots of linear-attention states: which sequence has which, and the snapshots that are kept.

Linear attention keeps one state a layer instead of keys and values of every position, so a sequence
can begin behind cached pages only where somebody took a *snapshot* of the states. One is taken:

- at the last page end of a prompt that a later prompt can read;
- where a prompt leaves the pages that the cache has of it, as others will leave them there too, and
  where one that waits leaves the prompt that it waits for;
- at every page end while a sequence decodes, of which it keeps the newest `DECODED`, and those that
  somebody read.

A snapshot belongs to an entry of the prefix cache and goes with it. It also goes when a newer one
needs its place and nobody read it for longest; the page stays then. So other weights, another
tenant's salt and tokens that differ keep a snapshot from a sequence as they keep a page from it.
"""

import heapq
from collections import OrderedDict, abc

import msgspec
import numpy as np

from tpdet.cache.prefix import CachedPage
from tpdet.cache.state_table import StateTable
from tpdet.cache.state_use import NO_SNAPSHOTS, StateUse, newest
from tpdet.cache.versions import NOBODY, SHARED
from tpdet.control import plan
from tpdet.errors import IntegrityError
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.scheduler.sequence import Sequence, readable_tokens

DECODED = 2
"""Snapshots of one sequence's decoded pages that are kept though nobody read them."""


class StateCounts(msgspec.Struct):
    """Slots in use now, and what was done to snapshots since the start.

    A snapshot that is read begins a sequence; one that is evicted gives way to a newer one.
    """

    state_slots: int = 0
    state_slots_used: int = 0
    snapshots: int = 0
    snapshots_used: int = 0
    snapshots_taken: int = 0
    snapshots_read: int = 0
    snapshots_evicted: int = 0


class StateSlots:
    """`running` slots for sequences, and `snapshots` behind them; rank 0's own table of both."""

    def __init__(self, running: int, snapshots: int) -> None:
        self.table = StateTable(running, snapshots)
        self._running = list(range(running))  # free ones, ascending, so already a heap
        self._free = list(range(running, running + snapshots))
        self._snapshots: OrderedDict[CachedPage, int] = OrderedDict()  # longest unread first
        self._read: set[CachedPage] = set()
        self._events: list[plan.StateEvent] = []
        self._counts = StateCounts(state_slots=running, snapshots=snapshots)

    @property
    def has_room(self) -> bool:
        """Whether another sequence may begin."""
        return bool(self._running)

    @property
    def counts(self) -> StateCounts:
        """A copy of the counts."""
        return msgspec.structs.replace(
            self._counts,
            state_slots_used=self._counts.state_slots - len(self._running),
            snapshots_used=self._counts.snapshots - len(self._free),
        )

    def usable(self, matched: list[CachedPage]) -> list[CachedPage]:
        """Those of the cached pages of a prefix behind which a sequence can begin."""
        return matched[: newest(matched, self._snapshots)]

    def begin(self, sequence: Sequence, cached: list[CachedPage], matched: int | None) -> None:
        """Give a slot to `sequence`, which begins behind the pages `cached`; see `has_room`.

        matched: pages that the cache has of it; None where nothing is shared.
        """
        slot, start = heapq.heappop(self._running), len(cached) * PAGE_TOKENS
        use = StateUse(slot, start // CHUNK_TOKENS, len(sequence.tokens))
        if cached:
            source = self._snapshots[cached[-1]]
            self._snapshots.move_to_end(cached[-1])
            self._read.add(cached[-1])
            self._counts.snapshots_read += 1
            self._record(plan.COPY_STATE, slot, sequence.version_id, source, use.standing)
        else:
            self._record(plan.CLEAR_STATE, slot, sequence.version_id)
        if matched is not None and self._counts.snapshots:
            readable = readable_tokens(sequence) // PAGE_TOKENS
            ends = sorted({matched * PAGE_TOKENS, readable * PAGE_TOKENS})
            use.taken, use.snapshot_ends = start, [end for end in ends if end > start]
        sequence.states = use

    def take(self, sequence: Sequence) -> None:
        """Take a snapshot of `sequence` where one is due, after the steps that are planned."""
        use = sequence.states
        if use is None or use.taken == NO_SNAPSHOTS or sequence.has_old_keys:
            return
        end = use.due(sequence.computed)
        slot = None if end is None else self._free_snapshot()
        if end is None or slot is None:
            return
        chunk = end // CHUNK_TOKENS
        kind = plan.COPY_STATE if use.standing == chunk else plan.ADVANCE_STATE
        self._record(kind, slot, SHARED, use.slot, chunk)
        self._counts.snapshots_taken += 1
        use.pending[end] = slot

    def leave_behind(self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> bytes:
        """The `PlanRows.snapshots` of rows that compute the next `counts[i]` of `sequences[i]`."""
        kept: list[tuple[int, int, int]] = []
        if len(counts) == sum(counts):
            return b""
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            use = sequence.states
            if use is None or count < 2 or sequence.drafted or sequence.has_old_keys:
                continue
            for end in use.passed(sequence.computed, sequence.computed + count):
                slot = self._free_snapshot()
                if slot is not None:
                    kept.append((row, end // CHUNK_TOKENS, slot))
                    use.pending[end] = slot
        self._counts.snapshots_taken += len(kept)
        return np.array(kept, np.int64).T.tobytes()

    def settle(self, sequence: Sequence, holds: abc.Callable[[CachedPage], bool]) -> None:
        """Give the snapshots of `sequence` to the pages that it shared meanwhile.

        holds: whether the cache finds a page. Where it does not, the snapshot goes.
        """
        use, entry = sequence.states, sequence.prefix.last
        if use is None or not use.pending:
            return
        while entry is not None and use.pending:
            slot = use.pending.pop(entry.depth * PAGE_TOKENS, None)
            if slot is not None and holds(entry) and entry not in self._snapshots:
                self._snapshots[entry] = slot
                if entry.depth * PAGE_TOKENS >= use.decodes_from:
                    use.decoded.append(entry)
            elif slot is not None:
                self._free_slot(slot)
            entry = entry.parent
        for end in [end for end in use.pending if end <= sequence.prefix.offered * PAGE_TOKENS]:
            self._free_slot(use.pending.pop(end))
        for entry in use.decoded[:-DECODED]:
            if entry not in self._read:
                self.forget(entry)
        del use.decoded[:-DECODED]

    def forget(self, entry: CachedPage) -> None:
        """Free the snapshot of a cached page, which may have none."""
        slot = self._snapshots.pop(entry, None)
        self._read.discard(entry)
        if slot is not None:
            self._free_slot(slot)

    def release(self, sequence: Sequence) -> None:
        """Take the slot of `sequence` back, and the snapshots that no cached page has."""
        use = sequence.states
        if use is None:
            return
        for slot in use.pending.values():
            self._free_slot(slot)
        self._record(plan.FREE_STATE, use.slot, sequence.version_id)
        heapq.heappush(self._running, use.slot)
        sequence.states = None

    @property
    def has_events(self) -> bool:
        """Whether slots changed since the last plan."""
        return bool(self._events)

    def take_events(self) -> tuple[plan.StateEvent, ...]:
        """The events since the last plan, in the order they happened."""
        events, self._events = tuple(self._events), []
        return events

    def follow(self, rows: plan.PlanRows) -> None:
        """A plan with these rows was made."""
        self.table.advance(rows)

    def check_integrity(
        self, sequences: abc.Iterable[Sequence], holds: abc.Callable[[CachedPage], bool]
    ) -> None:
        """Refuse (IntegrityError) unless `sequences` have exactly the slots that are in use.

        holds: whether the cache finds a page.
        """
        owners = dict.fromkeys((*self._running, *self._free), NOBODY)
        used: list[tuple[int, int]] = [(slot, SHARED) for slot in self._snapshots.values()]
        for sequence in sequences:
            use = sequence.states
            if use is None:
                raise IntegrityError(f"{sequence.key} runs without a slot of states")
            used.append((use.slot, sequence.version_id))
            used += [(slot, SHARED) for slot in use.pending.values()]
            if self.table.chunk(use.slot) != use.standing:
                raise IntegrityError(
                    f"{sequence.key} has its states at chunk {use.standing}, the table at chunk "
                    f"{self.table.chunk(use.slot)}"
                )
        for slot, owner in used:
            if slot in owners:
                raise IntegrityError(f"state slot {slot} is used twice, or is free")
            owners[slot] = owner
        for entry, slot in self._snapshots.items():
            at_end = self.table.chunk(slot) * CHUNK_TOKENS == entry.depth * PAGE_TOKENS
            if not at_end or not holds(entry):
                raise IntegrityError(f"snapshot {slot} is of no cached page's end")
        for slot in range(self.table.count):
            if owners.get(slot) != self.table.owner(slot):
                raise IntegrityError(
                    f"state slot {slot} belongs to {self.table.owner(slot):#018x} and to "
                    f"{owners.get(slot)}"
                )

    def _free_snapshot(self) -> int | None:
        """A free slot for a snapshot; the one that nobody read for longest gives way."""
        if not self._free and self._snapshots:
            self.forget(next(iter(self._snapshots)))
            self._counts.snapshots_evicted += 1
        return heapq.heappop(self._free) if self._free else None

    def _free_slot(self, slot: int) -> None:
        self._record(plan.FREE_STATE, slot, SHARED)
        heapq.heappush(self._free, slot)

    def _record(self, kind: int, slot: int, owner: int, source: int = 0, chunk: int = 0) -> None:
        event = plan.StateEvent(kind, slot, source, chunk, owner)
        self.table.apply((event,))
        self._events.append(event)
