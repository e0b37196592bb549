"""The machine of states, and bugs put in on purpose, which it must find."""

import pytest

from tests.scheduler.simulated.states import FakeSlot
from tests.scheduler.state_machine import run_machine
from tpdet.cache import state_use
from tpdet.cache.state_table import StateTable
from tpdet.cache.state_use import StateUse
from tpdet.errors import IntegrityError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.pending_steps import PendingSteps
from tpdet.scheduler.state_slots import StateSlots
from tpdet.speculative import draft_rows

EXAMPLES = 40  # seed 7 finds every bug below within as many
MANY_EXAMPLES = 3000


@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(MANY_EXAMPLES, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_no_order_of_events_gives_a_row_the_states_of_other_tokens(examples):
    counts = run_machine(examples, 1)
    names = ("taken", "read", "evicted", "accepted_drafts", "wrong_drafts", "preemptions")
    assert all(counts[name] > examples for name in names), counts
    assert counts["left_behind"] > examples / 2, counts


def take_snapshots_a_row_late(monkeypatch):
    """A snapshot has the first row behind its page end, too."""
    copy = FakeSlot.copy

    def late(self, source, chunk, advances):
        copy(self, source, chunk, advances)
        if advances:
            self.boundary[:-1] = self.boundary[1:]

    monkeypatch.setattr(FakeSlot, "copy", late)


def leave_snapshots_a_row_late(monkeypatch):
    """What a row leaves behind has the first row behind its page end, too."""
    compute = FakeSlot.compute

    def late(self, ids, row, weights, old_keys, snapshots):
        compute(self, ids, row, weights, old_keys, snapshots)
        for snapshot in snapshots.values():
            snapshot.boundary[:-1] = snapshot.boundary[1:]

    monkeypatch.setattr(FakeSlot, "compute", late)


def leave_snapshots_where_the_state_is_not(monkeypatch):
    """A row leaves a snapshot behind at its last page end, which it may not pass by a chunk."""
    monkeypatch.setattr(state_use, "keeps_by_pass", lambda position, end: end > position)


def take_snapshots_anywhere(monkeypatch):
    """A snapshot is taken at a page end however many rows lie behind it."""

    def due(self, computed):
        end = computed // PAGE_TOKENS * PAGE_TOKENS
        taken, self.taken = self.taken, max(end, self.taken)
        return end if end > taken else None

    monkeypatch.setattr(StateUse, "due", due)


def begin_behind_every_cached_page(monkeypatch):
    """A hit ends at the last cached page, wherever the last snapshot is."""
    usable = StateSlots.usable

    def wrong(self, matched):
        entries = usable(self, matched)
        if entries:
            self._snapshots |= dict.fromkeys(matched, self._snapshots[entries[-1]])
        return usable(self, matched)

    monkeypatch.setattr(StateSlots, "usable", wrong)


def advance_by_drafts(monkeypatch):
    """A slot stands at the last row's chunk after a row of drafts, which may be rejected."""
    monkeypatch.setattr(state_use, "chunk_after", lambda start, end, drafts: (end - 1) // 8)


def let_drafts_run_on(monkeypatch):
    """Drafts end where the pages do, over any number of chunk ends."""
    monkeypatch.setattr(draft_rows, "last_draft_end", lambda start: start + 1000)


def keep_snapshots_of_other_weights(monkeypatch):
    """A snapshot outlives the page that it belongs to."""
    monkeypatch.setattr(StateSlots, "forget", lambda self, entry: None)


def free_slots_in_flight(monkeypatch):
    """The slot of a sequence that ends in flight is free at once, while a step still writes it."""
    monkeypatch.setattr(PendingSteps, "has", lambda self, sequence: False)


def leave_the_last_inputs(monkeypatch):
    """A slot keeps the inputs of the sequence that had it before."""

    def clear(self):
        self.boundary = self.boundary[:0]

    monkeypatch.setattr(FakeSlot, "clear", clear)


def forget_an_event(monkeypatch):
    """A rank's table does not hear of the slots that are freed."""
    apply = StateTable.apply
    monkeypatch.setattr(
        StateTable, "apply", lambda self, events: apply(self, [e for e in events if e.kind != 3])
    )


BUGS = (
    take_snapshots_a_row_late, leave_snapshots_a_row_late, leave_snapshots_where_the_state_is_not,
    take_snapshots_anywhere, begin_behind_every_cached_page,
    advance_by_drafts, let_drafts_run_on, keep_snapshots_of_other_weights, free_slots_in_flight,
    leave_the_last_inputs, forget_an_event,
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_machine_finds_a_bug_that_was_put_in(monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError, IndexError, ValueError)):
        run_machine(EXAMPLES, 7, shrink=False)
