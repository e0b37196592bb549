"""Linear-attention states without torch: a state is the list of the token ids that it has seen.

A slot has a boundary (the ids before its chunk), a ring of the rows behind it, and a ring of the
convolution's inputs, as a rank's tensors have. Whatever is read must be the ids that the pages
have, under the present weights; so a state that is a row late, of another prefix, of a rejected
draft or of other weights is seen at once.
"""

import numpy as np

from tpdet.cache.state_table import StateTable
from tpdet.control.plan import ADVANCE_STATE, CLEAR_STATE, FREE_STATE, Row, StateEvent
from tpdet.kernels.order import CHUNK_TOKENS

UNWRITTEN = -997
BEFORE = -996  # stands for inputs before position 0
TAPS = 3  # inputs before a row that its convolution reads
WEIGHTS = 1 << 20  # an id is stored with the number of the weights, so many times


class FakeSlot:
    """One slot: ids before its chunk, and what its rings hold."""

    def __init__(self) -> None:
        ring = 2 * CHUNK_TOKENS
        self.boundary = np.full(1, UNWRITTEN)
        self.rows = np.full(ring, UNWRITTEN)
        self.inputs = np.full(ring, UNWRITTEN)

    def copy(self, source: "FakeSlot", chunk: int, advances: bool) -> None:
        """Take the boundary of `source`, and the inputs before `chunk`."""
        self.boundary = source.advanced(chunk - 1) if advances else source.boundary.copy()
        before = np.arange(chunk * CHUNK_TOKENS - TAPS, chunk * CHUNK_TOKENS)
        self.inputs[before % len(self.inputs)] = source.inputs[before % len(self.inputs)]

    def clear(self) -> None:
        """Hold the state before position 0."""
        self.boundary = np.empty(0, int)
        self.inputs[-TAPS:] = BEFORE

    def advanced(self, chunk: int) -> np.ndarray:
        """The boundary after the rows of `chunk`, at which it is."""
        return np.concatenate([self.boundary, self.of(chunk * CHUNK_TOKENS, CHUNK_TOKENS)])

    def of(self, start: int, count: int) -> np.ndarray:
        """The rows of positions from `start` on."""
        return self.rows[np.arange(start, start + count) % len(self.rows)]

    def compute(
        self,
        ids: np.ndarray,
        row: Row,
        weights: int,
        old_keys: bool,
        snapshots: "dict[int, FakeSlot]",
    ) -> None:
        """Compute a row, after which positions [0, end) have these ids; AssertionError if not.

        old_keys: other weights may have computed some of them. snapshots: those of chunks at whose
        start the states are kept.
        """
        start, end, ring = row.start, len(ids), len(self.rows)
        window = np.arange(max(0, start - TAPS), start)
        inputs = self.inputs[np.arange(start - TAPS, start) % ring]
        assert (inputs[: TAPS - len(window)] == BEFORE).all(), "inputs before position 0"
        _check(inputs[TAPS - len(window) :], ids[window], weights, old_keys)
        if start // CHUNK_TOKENS > row.standing:
            self.boundary = self.advanced(row.standing)
        first = start // CHUNK_TOKENS
        for chunk in range(first, (end - 1) // CHUNK_TOKENS + 1):
            begin, stop = max(start, chunk * CHUNK_TOKENS), min(end, (chunk + 1) * CHUNK_TOKENS)
            if chunk > first and row.samples <= 1:
                self.boundary = self.advanced(chunk - 1)
            if chunk in snapshots:
                snapshots[chunk].copy(self, chunk, advances=False)
            places = np.arange(begin, stop) % ring
            self.rows[places] = self.inputs[places] = ids[begin:stop] + weights * WEIGHTS
        behind = self.of(len(self.boundary), end - len(self.boundary))
        _check(np.concatenate([self.boundary, behind]), ids, weights, old_keys)


def _check(seen: np.ndarray, ids: np.ndarray, weights: int, old_keys: bool) -> None:
    """AssertionError unless these are the ids, all stored under these weights."""
    number = (seen + WEIGHTS // 2) // WEIGHTS
    assert np.array_equal(seen - number * WEIGHTS, ids), "states of other tokens"
    assert old_keys or (number == weights).all(), "states of other weights"


class FakeStates:
    """The slots of one rank, and its table of them.

    weights: the number of the present ones; old_keys: owners that keep states of others.
    """

    def __init__(self, running: int, snapshots: int) -> None:
        self.weights = 0
        self.old_keys: set[int] = set()
        self.table = StateTable(running, snapshots)
        self.slots = [FakeSlot() for _ in range(running + snapshots)]

    def compute(self, row: Row, ids: np.ndarray) -> None:
        """Compute a row; ids: of all positions up to its end, as its pages have them."""
        old_keys = row.version_id in self.old_keys
        snapshots = {chunk: self.slots[slot] for chunk, slot in row.snapshots}
        self.slots[row.slot].compute(ids, row, self.weights, old_keys, snapshots)

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
