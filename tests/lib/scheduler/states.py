"""Linear-attention states without torch: a state is the list of the token ids that it has seen.

A slot has a boundary (the ids before its chunk), a ring of the rows behind it, and a ring of the
convolution's inputs, as a rank's tensors have. Whatever is read must be the ids that the pages
have; so a state that is a row late, of another prefix or of a rejected draft is seen at once.
"""

import numpy as np

from tpdet.cache.state_table import StateTable
from tpdet.control.plan import ADVANCE_STATE, CLEAR_STATE, FREE_STATE, Row, StateEvent
from tpdet.kernels.order import CHUNK_TOKENS

UNWRITTEN = -997
BEFORE = -996  # stands for inputs before position 0
TAPS = 3  # inputs before a row that its convolution reads


class FakeSlot:
    """One slot: ids before its chunk, and what its rings hold."""

    def __init__(self) -> None:
        ring = 2 * CHUNK_TOKENS
        self.boundary = np.full(1, UNWRITTEN, "<i4")
        self.rows = np.full(ring, UNWRITTEN, "<i4")
        self.inputs = np.full(ring, UNWRITTEN, "<i4")

    def copy(self, source: "FakeSlot", chunk: int, advances: bool) -> None:
        """Take the boundary of `source`, and the inputs before `chunk`."""
        self.boundary = source.advanced(chunk - 1) if advances else source.boundary.copy()
        before = np.arange(chunk * CHUNK_TOKENS - TAPS, chunk * CHUNK_TOKENS)
        self.inputs[before % len(self.inputs)] = source.inputs[before % len(self.inputs)]

    def clear(self) -> None:
        """Hold the state before position 0."""
        self.boundary = np.empty(0, "<i4")
        self.inputs[:] = BEFORE

    def advanced(self, chunk: int) -> np.ndarray:
        """The boundary after the rows of `chunk`, at which it is."""
        return np.concatenate([self.boundary, self.of(chunk * CHUNK_TOKENS, CHUNK_TOKENS)])

    def of(self, start: int, count: int) -> np.ndarray:
        """The rows of positions from `start` on."""
        return self.rows[np.arange(start, start + count) % len(self.rows)]

    def compute(self, ids: np.ndarray, row: Row) -> None:
        """Compute a row, after which positions [0, end) have these ids; AssertionError if not."""
        start, end, ring = row.start, len(ids), len(self.rows)
        window = np.arange(start - TAPS, start)
        expected = np.where(window < 0, BEFORE, ids[np.maximum(window, 0)])
        assert (self.inputs[window % ring] == expected).all(), "inputs of other rows"
        if start // CHUNK_TOKENS > row.standing:
            self.boundary = self.advanced(row.standing)
        first = start // CHUNK_TOKENS
        for chunk in range(first, (end - 1) // CHUNK_TOKENS + 1):
            begin, stop = max(start, chunk * CHUNK_TOKENS), min(end, (chunk + 1) * CHUNK_TOKENS)
            if chunk > first and row.samples <= 1:
                self.boundary = self.advanced(chunk - 1)
            places = np.arange(begin, stop) % ring
            self.rows[places] = self.inputs[places] = ids[begin:stop]
        seen = np.concatenate(
            [self.boundary, self.of(len(self.boundary), end - len(self.boundary))]
        )
        assert np.array_equal(seen, ids), "states of other tokens"


class FakeStates:
    """The slots of one rank, and its table of them."""

    def __init__(self, running: int, snapshots: int) -> None:
        self.table = StateTable(running, snapshots)
        self.slots = [FakeSlot() for _ in range(running + snapshots)]

    def apply(self, events: tuple[StateEvent, ...]) -> None:
        """Apply a plan's events."""
        self.table.apply(events)
        for event in events:
            slot = self.slots[event.slot]
            if event.kind == FREE_STATE:
                self.slots[event.slot] = FakeSlot()
            elif event.kind == CLEAR_STATE:
                slot.clear()
            else:
                advances = event.kind == ADVANCE_STATE
                slot.copy(self.slots[event.source], event.chunk, advances)
