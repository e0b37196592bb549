"""A rank without torch: page tables as a rank keeps them, and a paged store of token ids for K/V.

Beside each id stands a hash of all tokens up to it, as K/V depend on them; a reader checks it. A
position may be broken: what is written there is NAN, and whoever reads it fails.
"""

import numpy as np

from tests.scheduler.simulated.states import FakeStates
from tpdet.cache.versions import VersionTable
from tpdet.control.plan import ALLOCATE, EVICT, Row, StepPlan, settle_rows
from tpdet.kernels.order import PAGE_TOKENS

POISON = -999
NAN = -998
POWERS = np.cumprod(np.full(1 << 14, 1099511628211, dtype=np.uint64))


class FakeRank:
    """Applies plans as a rank must, and keeps K/V as token ids in pages."""

    def __init__(self, num_pages: int, states: FakeStates | None = None) -> None:
        self.table, self.states = VersionTable(num_pages), states
        self.store = np.full((num_pages, PAGE_TOKENS), POISON, dtype="<i4")
        self.before = np.zeros((num_pages, PAGE_TOKENS), dtype=np.uint64)

    def receive(
        self, plan: StepPlan, drawn: list[int], broken: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        """Apply the events, compare digests, check the readers, write the step's K/V.

        drawn: the tokens of the step before, which negative ids stand for. broken: positions
        of owners where NAN is written.
        """
        self.table.apply(plan.events)
        assert self.table.digest() == plan.table_digest
        self.table.check_readers(plan.rows)
        rows = plan.rows
        if rows.expected:
            rows, _ = settle_rows(rows, np.array(drawn))
        if self.states is not None:
            self.states.apply(plan.states)
            assert self.states.table.digest() == plan.state_digest
            self.states.table.check_rows(plan.rows)
            self.states.table.advance(plan.rows)
        else:
            assert not (plan.states or plan.state_digest or plan.rows.states)
        for event in plan.events:
            if event.kind in (ALLOCATE, EVICT):
                self.store[event.page] = POISON
        for row in rows:
            ids = [
                NAN
                if (row.version_id, row.start + offset) in broken
                else token
                if token >= 0
                else drawn[-1 - token]
                for offset, token in enumerate(row.token_ids)
            ]
            places = np.arange(row.start, row.start + len(ids))
            pages, slots = np.asarray(row.pages)[places // PAGE_TOKENS], places % PAGE_TOKENS
            earlier = np.uint64(0)
            if row.start:
                page, slot = divmod(row.start - 1, PAGE_TOKENS)
                earlier = self.before[row.pages[page], slot]
            self.store[pages, slots] = ids
            self.before[pages, slots] = earlier + prefix_hashes(np.asarray(ids), row.start)
            if self.states is not None:
                self.states.compute(row, self.read(row, row.start + len(ids)))

    def read(self, row: Row, length: int) -> np.ndarray:
        """The first `length` token ids, read through the row's pages."""
        pages = list(row.pages)
        ids = self.store[pages].reshape(-1)[:length]
        assert not (ids == POISON).any()
        before = self.before[pages].reshape(-1)[:length]
        assert (before == prefix_hashes(ids, 0)).all(), "K/V of another prefix"
        return ids


def prefix_hashes(ids: np.ndarray, start: int) -> np.ndarray:
    """A hash of ids[:i + 1] at i; those of a whole are the sums of its parts'."""
    return (ids.astype(np.uint64) * POWERS[start : start + len(ids)]).cumsum()
