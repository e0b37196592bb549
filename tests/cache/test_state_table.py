"""The state table: what no plan may do to a slot, and that every change reaches the digest."""

import pytest

from tpdet.cache.state_table import StateTable, chunk_after, first_state_difference, last_draft_end
from tpdet.cache.versions import SHARED
from tpdet.control.plan import (
    ADVANCE_STATE,
    CLEAR_STATE,
    COPY_STATE,
    FREE_STATE,
    PlanRows,
    Row,
    StateEvent,
)
from tpdet.errors import IntegrityError
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

OWNER, OTHER, CHUNK = 11, 12, PAGE_TOKENS // CHUNK_TOKENS
CLEAR = StateEvent(CLEAR_STATE, 0, 0, 0, OWNER)
ADVANCE = StateEvent(ADVANCE_STATE, 3, 0, CHUNK, SHARED)


def row(start, count, standing, owner=OWNER, slot=0, samples=1, snapshots=()):
    pages = -(-(start + count) // PAGE_TOKENS)
    numbers = tuple(range(pages))
    held = numbers, numbers, samples, samples
    return Row(owner, 0, owner, start, (5,) * count, *held, slot, standing, snapshots=snapshots)


def table_after(*rows, events=(CLEAR,)):
    table = StateTable(2, 2)
    table.apply(events)
    for one in rows:
        columns = PlanRows.of([one])
        table.check_rows(columns)
        table.advance(columns)
    return table


def test_a_slot_follows_its_rows_and_a_snapshot_stands_at_the_page_end():
    table = table_after(row(0, PAGE_TOKENS, 0))
    assert table.chunk(0) == CHUNK - 1
    table.apply([ADVANCE])
    assert (table.chunk(0), table.chunk(3), table.owner(3)) == (CHUNK - 1, CHUNK, SHARED)
    begins = StateEvent(COPY_STATE, 1, 3, CHUNK, OTHER)
    table.apply([begins, StateEvent(FREE_STATE, 0, 0, 0, OWNER)])
    columns = PlanRows.of([row(PAGE_TOKENS, 1, CHUNK, OTHER, 1)])
    table.check_rows(columns)
    table.advance(columns)
    assert (table.chunk(1), table.owner(0)) == (CHUNK, 0)


def test_a_row_leaves_snapshots_of_page_ends_behind():
    kept = (CHUNK, 3), (2 * CHUNK, 2)
    table = table_after(row(0, 2 * PAGE_TOKENS + CHUNK_TOKENS + 1, 0, snapshots=kept))
    assert [table.owner(slot) for slot in (2, 3)] == [SHARED, SHARED]
    assert (table.chunk(0), table.chunk(3), table.chunk(2)) == (2 * CHUNK + 1, CHUNK, 2 * CHUNK)
    table.apply(
        [StateEvent(COPY_STATE, 1, 3, CHUNK, OTHER), StateEvent(FREE_STATE, 2, 0, 0, SHARED)]
    )
    others = [row(0, 400, 0, snapshots=((CHUNK, slot),)) for slot in (2, 3)]
    assert len({table_after(each).digest() for each in (*others, row(0, 400, 0))}) == 3


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"snapshots": ((CHUNK, 1),)}, "slot 1, which is not free"),
        ({"snapshots": ((CHUNK, 4),)}, "slot 4, which is not free"),
        ({"snapshots": ((CHUNK, 2), (2 * CHUNK, 2))}, "in one slot"),
        ({"snapshots": ((CHUNK - 1, 2),)}, "chunk 3, which is not"),
        ({"snapshots": ((3 * CHUNK, 2),)}, "chunk 12, which is not"),
        ({"snapshots": ((0, 2),)}, "chunk 0, which is not"),
        (
            {"count": PAGE_TOKENS + CHUNK_TOKENS, "snapshots": ((CHUNK, 2),)},
            "chunk 4, which is not",
        ),
        ({"snapshots": ((CHUNK, 2),), "samples": 2}, "drafts up to|chunk 4, which is not"),
    ],
)
def test_a_snapshot_that_a_row_cannot_leave_behind_is_refused(wrong, why):
    with pytest.raises(IntegrityError, match=why):
        table_after(row(**({"start": 0, "count": 700, "standing": 0} | wrong)))
    table = table_after(row(0, PAGE_TOKENS, 0))
    table.apply([ADVANCE])
    with pytest.raises(IntegrityError, match="slot 3, which is not free"):
        table.check_rows(PlanRows.of([row(256, 700, 3, snapshots=((2 * CHUNK, 3),))]))


def test_drafts_leave_a_slot_at_their_first_chunk_and_end_before_a_third():
    for start in range(3 * CHUNK_TOKENS):
        end = last_draft_end(start)
        assert start < end <= start + 2 * CHUNK_TOKENS - 3
        assert end // CHUNK_TOKENS - chunk_after(start, end, drafts=True) <= 1
    assert last_draft_end(60) == 127 and last_draft_end(0) == 125
    table_after(row(0, 125, 0, samples=125))
    for start, count in ((0, 126), (60, 68)):
        with pytest.raises(IntegrityError, match="has drafts up to"):
            standing = start // CHUNK_TOKENS
            table_after(
                *([row(0, start, 0)] * bool(start)), row(start, count, standing, samples=count)
            )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (row(0, 1, 0, OTHER), "belongs to"),
        (row(0, 1, 0, slot=2), "there are 2"),
        (row(0, 1, 0, slot=-1), "there are 2"),
        (row(64, 1, 1), "stands at chunk 0"),
        (row(128, 1, 0), "begins in chunk 2"),
    ],
)
def test_a_row_of_another_slot_or_another_chunk_is_refused(wrong, why):
    with pytest.raises(IntegrityError, match=why):
        table_after(wrong)


def test_two_rows_of_one_slot_and_rows_without_states_are_refused():
    table = table_after()
    with pytest.raises(IntegrityError, match="two rows"):
        table.check_rows(PlanRows.of([row(0, 1, 0), row(0, 1, 0)]))
    with pytest.raises(IntegrityError, match="state slot -1"):
        table.check_rows(PlanRows.of([row(0, 1, 0, slot=-1)]))


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (StateEvent(9, 0, 0, 0, OWNER), "unknown kind"),
        (StateEvent(CLEAR_STATE, 4, 0, 0, OTHER), "there are 4"),
        (StateEvent(CLEAR_STATE, 0, 0, 0, OTHER), "belongs to"),
        (StateEvent(CLEAR_STATE, 1, 0, 0, SHARED), "belongs to"),
        (StateEvent(CLEAR_STATE, 2, 0, 0, OTHER), "belongs to"),
        (StateEvent(CLEAR_STATE, 1, 0, 4, OTHER), "a source or a chunk"),
        (StateEvent(FREE_STATE, 0, 0, 0, OTHER), "belongs to"),
        (StateEvent(COPY_STATE, 1, 2, CHUNK, OTHER), "does not stand there"),
        (StateEvent(COPY_STATE, 1, 3, 2 * CHUNK, OTHER), "does not stand there"),
        (StateEvent(ADVANCE_STATE, 2, 0, 2 * CHUNK, SHARED), "does not stand there"),
        (StateEvent(ADVANCE_STATE, 1, 0, CHUNK, OTHER), "only one of them"),
        (StateEvent(COPY_STATE, 2, 3, CHUNK, SHARED), "only one of them"),
    ],
)
def test_an_event_that_no_scheduler_makes_is_refused(event, why):
    table = table_after(row(0, PAGE_TOKENS, 0))
    table.apply([ADVANCE])
    with pytest.raises(IntegrityError, match=why):
        table.apply([event])
    late = table_after(row(0, 65, 0))
    with pytest.raises(IntegrityError, match="begins no page"):
        late.apply([StateEvent(ADVANCE_STATE, 2, 0, 2, SHARED)])


def test_digests_differ_by_every_event_and_row_and_name_the_slot():
    tables = [
        table_after(),
        table_after(events=()),
        table_after(events=(StateEvent(CLEAR_STATE, 1, 0, 0, OWNER),)),
        table_after(row(0, 1, 0)),
        table_after(row(0, 65, 0)),
    ]
    assert len({table.digest() for table in tables}) == len(tables)
    same, moved = tables[0].snapshot(), tables[4].snapshot()
    assert first_state_difference(same, same) is None
    assert "state slot 0 stands at chunk 0" in first_state_difference(same, moved)
    assert first_state_difference(same, same[:32]) == "4 state slots here, 2 there"
