"""Rows behind unverified drafts in any order of events; bugs put in on purpose are found."""

import pytest

from tests.scheduler.simulated import rank, simulation
from tests.scheduler.state_machine import FollowingMachine, run_machine
from tpdet.control.plan import settle_rows
from tpdet.scheduler.pending_steps import PendingSteps
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import settle_row

EXAMPLES = 40  # every bug below is found within as many


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_no_order_of_events_changes_an_answer(examples):
    counts = run_machine(examples, 1, machine_of=FollowingMachine)
    names = "accepted_drafts", "wrong_drafts", "preemptions"
    assert all(counts[name] > examples for name in names), counts
    assert counts["behind"] > counts["with_drafts"] > examples / 4, counts


def accept_every_draft(monkeypatch):
    """The ranks begin rows as if all drafts were right."""

    def wrong(rows, sampled):
        sampled = sampled.copy()
        for row in rows:
            if row.unverified:
                first = -1 - row.token_ids[0]
                sampled[first : first + row.unverified] = row.expected[: row.unverified]
        return settle_rows(rows, sampled)

    for module in (rank, simulation):
        monkeypatch.setattr(module, "settle_rows", wrong)


def lack_the_page_behind_drafts(monkeypatch):
    """No page is taken for the token behind drafts that fill the last one."""
    wrong = lambda self: [s for s in self if len(s.tokens) > s.room]
    monkeypatch.setattr(SequenceQueue, "lacking_pages", wrong)


def forget_where_a_row_ends(monkeypatch):
    """A settled row keeps its first possible end."""

    def wrong(self, sequence, tokens):
        if sequence.expected:
            settle_row(sequence, tokens - 1, self._steps[0].drafted.get(sequence.key, 0))

    monkeypatch.setattr(PendingSteps, "settle", wrong)


BUGS = accept_every_draft, lack_the_page_behind_drafts, forget_where_a_row_ends


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_every_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(BaseException):  # noqa: B017
        run_machine(EXAMPLES, 1, shrink=False, machine_of=FollowingMachine)
