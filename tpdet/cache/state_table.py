"""The state table: what every slot of linear-attention states holds, the same on every rank.

A *slot* has the states of all linear-attention layers for one sequence. Slots 0 to `running - 1`
belong to running sequences, the others hold *snapshots*: states at a page end, from which sequences
begin and which no row advances. A slot *stands at* a chunk: it holds the states at the start of
that chunk. While a sequence's rows are computed its slot follows them (`chunk_after`), so that a
row finds its slot at its own first chunk, or at the one before.

As with pages, ranks never decide a change. They apply the plan's events and rows in order and
compare digests; a row whose slot is another's, or stands at another chunk, is refused.
"""

import struct
from collections import abc
from functools import partial
from typing import NamedTuple

import blake3
import numpy as np

from tpdet.cache.versions import NOBODY, SHARED, first_difference
from tpdet.control.plan import (
    ADVANCE_STATE,
    COPY_STATE,
    FREE_STATE,
    STATE_EVENT_NAMES,
    PlanRows,
    Row,
    StateEvent,
    row_name,
    snapshot_columns,
)
from tpdet.errors import IntegrityError
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

_LINK = struct.Struct("<BqqqQ")  # an event


def chunk_after(start: int, end: int, drafts: bool) -> int:
    """The chunk at which a slot stands after a row of positions [start, end).

    Nobody knows yet which drafts count, so a row of drafts leaves the slot at its first chunk.
    """
    return (start if drafts else end - 1) // CHUNK_TOKENS


def last_draft_end(start: int) -> int:
    """The furthest end of a row with drafts from position `start` on.

    A slot has room for the rows of two chunks. The position behind the last draft lies in these two
    chunks too, and the convolution's last three inputs before `start` are kept.
    """
    return min((start // CHUNK_TOKENS + 2) * CHUNK_TOKENS - 1, start + 2 * CHUNK_TOKENS - 3)


def keeps_by_pass(position: int, end: int) -> bool:
    """Whether a row that passes `position` and has this end must leave a snapshot of it behind.

    Where no more than a chunk of rows lies behind, one can be taken after the step too.
    """
    return end > position + CHUNK_TOKENS


class StateRoom(NamedTuple):
    """Slots of a rank: of running sequences, and of snapshots."""

    running: int
    snapshots: int


class StateTable:
    """Owner and chunk of `running` slots of sequences and of `snapshots` behind them; all free.

    The owner of a snapshot is SHARED.
    """

    def __init__(self, running: int, snapshots: int) -> None:
        self.running, self.count = running, running + snapshots
        self._owners = np.full(self.count, NOBODY, np.uint64)
        self._chunks = np.zeros(self.count, np.int64)
        self._chain = blake3.blake3(struct.pack("<QQ", running, snapshots)).digest()

    def owner(self, slot: int) -> int:
        """The version_id of the sequence that has `slot`, SHARED for a snapshot, or NOBODY."""
        return int(self._owners[slot])

    def chunk(self, slot: int) -> int:
        """The chunk at which `slot` stands."""
        return int(self._chunks[slot])

    def apply(self, events: abc.Iterable[StateEvent]) -> None:
        """Apply a plan's events in order.

        A slot that is written must be free, and one that is read must stand at the named chunk
        (ADVANCE_STATE: at the one before). Snapshots are made at page ends, of running slots, and
        nothing else is read of them. FREE_STATE wants the owner named. Raises IntegrityError.
        """
        for event in events:
            self._check(event)
            kind, slot = event.kind, event.slot
            self._owners[slot] = NOBODY if kind == FREE_STATE else event.version_id
            self._chunks[slot] = event.chunk
            link = _LINK.pack(kind, slot, event.source, event.chunk, event.version_id)
            self._chain = blake3.blake3(self._chain + link).digest()

    def check_rows(self, rows: PlanRows) -> None:
        """Refuse (IntegrityError) rows whose slots are not theirs or stand at another chunk.

        A row goes on from the start of its first chunk, or of the one before. Drafts end where
        `last_draft_end` says. Snapshots that rows leave behind go to free slots, at page ends.
        """
        if len(rows) and not self._may_touch(rows):
            for row in rows:
                self._refuse(row)
            raise IntegrityError("two rows of a step have one slot of states")
        if rows.snapshots:
            self._check_snapshots(rows)

    def advance(self, rows: PlanRows) -> None:
        """Let the slots follow a plan's rows; call it after `check_rows`."""
        if not len(rows):
            return
        slots, drafts = rows.state_columns[0], rows.samples > 1
        ends = rows.start + rows.count
        self._chunks[slots] = np.where(drafts, rows.start, ends - 1) // CHUNK_TOKENS
        _, chunks, snapshots = snapshot_columns(rows)
        self._owners[snapshots], self._chunks[snapshots] = SHARED, chunks
        link = rows.states + self._chunks[slots].tobytes() + rows.snapshots
        self._chain = blake3.blake3(self._chain + link).digest()

    def digest(self) -> bytes:
        """32 bytes over all events and rows so far."""
        return self._chain

    def full_digest(self) -> bytes:
        """32 bytes over the events and rows so far and the table itself."""
        return blake3.blake3(self._chain + self.snapshot()).digest()

    def snapshot(self) -> bytes:
        """16 bytes for each slot: chunk, then owner, as little-endian 64-bit integers."""
        return np.stack([self._chunks.view(np.uint64), self._owners], 1).astype("<u8").tobytes()

    def _check(self, event: StateEvent) -> None:
        kind, slot = event.kind, event.slot
        if kind not in STATE_EVENT_NAMES:
            raise IntegrityError(f"state event of unknown kind {kind} for slot {slot}")
        name, frees = STATE_EVENT_NAMES[kind], kind == FREE_STATE
        if not 0 <= slot < self.count:
            raise IntegrityError(f"{name} of state slot {slot}: there are {self.count}")
        expected = event.version_id if frees else NOBODY
        kept = frees or (event.version_id == SHARED) == (slot >= self.running)
        if self.owner(slot) != expected or event.version_id == NOBODY or not kept:
            raise IntegrityError(
                f"{name} of state slot {slot} for {event.version_id:#018x}: it belongs to "
                f"{self.owner(slot):#018x}"
            )
        if kind in (COPY_STATE, ADVANCE_STATE):
            self._check_source(event)
        elif event.source or event.chunk:
            raise IntegrityError(f"{name} of state slot {slot} names a source or a chunk")

    def _check_source(self, event: StateEvent) -> None:
        """Raise IntegrityError unless an event's source has the states that it is to give."""
        source, chunk, name = event.source, event.chunk, STATE_EVENT_NAMES[event.kind]
        advances, takes = event.kind == ADVANCE_STATE, event.slot >= self.running
        owned = 0 <= source < self.count and self.owner(source) != NOBODY
        if not owned or self.chunk(source) != chunk - advances:
            raise IntegrityError(
                f"{name} of state slot {source} to {event.slot} at chunk {chunk}: the source does "
                "not stand there"
            )
        if takes != (source < self.running) or (advances and not takes):
            raise IntegrityError(
                f"{name} of state slot {source} to {event.slot}: only one of them is a snapshot, "
                "and none is advanced into a running slot"
            )
        if chunk * CHUNK_TOKENS % PAGE_TOKENS:
            raise IntegrityError(f"{name} of state slot {source}: chunk {chunk} begins no page")

    def _may_touch(self, rows: PlanRows) -> bool:
        slots, standing = rows.state_columns
        if len(slots) != len(rows) or slots.min() < 0 or slots.max() >= self.running:
            return False
        behind = rows.start // CHUNK_TOKENS - standing
        sound = (self._owners[slots] == rows.version_id) & (self._chunks[slots] == standing)
        sound &= (behind == 0) | (behind == 1)
        for index in np.flatnonzero(rows.samples > 1).tolist():
            start = int(rows.start[index])
            sound[index] &= start + rows.count[index] <= last_draft_end(start)
        return bool(sound.all()) and len(np.unique(slots)) == len(slots)

    def _check_snapshots(self, rows: PlanRows) -> None:
        """Raise IntegrityError for a snapshot that its row cannot leave behind, or not there."""
        columns = snapshot_columns(rows)
        for index, chunk, slot in columns.T.tolist():
            row, start = rows[index], chunk * CHUNK_TOKENS
            if not self.running <= slot < self.count or self.owner(slot) != NOBODY:
                raise IntegrityError(
                    f"{row_name(row)} would leave a snapshot in slot {slot}, which is not free"
                )
            inside = row.start < start and keeps_by_pass(start, row.start + len(row.token_ids))
            if not inside or row.samples > 1 or start % PAGE_TOKENS:
                raise IntegrityError(
                    f"{row_name(row)} would leave a snapshot of chunk {chunk}, which is not the "
                    "first one of a page in the middle of it"
                )
        if len(np.unique(columns[2])) < columns.shape[1]:
            raise IntegrityError("two rows of a step leave a snapshot in one slot of states")

    def _refuse(self, row: Row) -> None:
        """Raise IntegrityError for a row that may not touch its slot."""
        name, slot, end = row_name(row), row.slot, row.start + len(row.token_ids)
        if not 0 <= slot < self.running:
            raise IntegrityError(f"{name} has state slot {slot}; there are {self.running}")
        if self.owner(slot) != row.version_id:
            raise IntegrityError(
                f"{name} would advance state slot {slot} as owner {row.version_id:#018x}, but it "
                f"belongs to {self.owner(slot):#018x}"
            )
        chunk = row.start // CHUNK_TOKENS
        if self.chunk(slot) != row.standing or chunk - row.standing not in (0, 1):
            raise IntegrityError(
                f"{name} begins in chunk {chunk} with states at chunk {row.standing}; slot {slot} "
                f"stands at chunk {self.chunk(slot)}"
            )
        if row.samples > 1 and end > last_draft_end(row.start):
            raise IntegrityError(
                f"{name} has drafts up to position {end - 1}, past {last_draft_end(row.start) - 1}"
            )


first_state_difference = partial(first_difference, terms=("state slot", "stands", "chunk", "for"))
"""Name the first slot at which two snapshots of tables differ, with chunks and owners."""
