import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpdet.cache.versions import (
    ALL_PAGES,
    NOBODY,
    SHARED,
    VersionTable,
    first_difference,
    version_id,
)
from tpdet.control.plan import ALLOCATE, EVICT, NAN, RELOAD, SHARE, PageEvent, PlanRows, Row
from tpdet.errors import IntegrityError

A, B = version_id("a", 1), version_id("b", 1)


def row(owner=A, pages=(0,), versions=(1,), start=0, tokens=3):
    return Row(0, 0, owner, start, (1,) * tokens, pages, versions, 1)


def one(only):
    return PlanRows.of((only,))


def table_with(*events, pages=4):
    table = VersionTable(pages)
    table.apply(events)
    return table


def test_every_kind_of_change_bumps_the_version():
    table = VersionTable(2)
    expected = []
    for kind, page, owner in [
        (ALLOCATE, 0, A),
        (NAN, 0, A),
        (EVICT, 0, A),
        (RELOAD, ALL_PAGES, 0),
        (ALLOCATE, 0, B),
    ]:
        table.apply((PageEvent(kind, page, owner),))
        expected.append((table.version(0), table.owner(0)))
    assert expected == [(1, A), (2, A), (3, NOBODY), (4, NOBODY), (5, B)]
    assert (table.version(1), table.owner(1)) == (1, NOBODY)


@pytest.mark.parametrize("kind", [EVICT, NAN])
def test_a_reader_from_before_a_change_is_refused_with_page_and_versions(kind):
    table = table_with(PageEvent(ALLOCATE, 2, A))
    reader = row(pages=(2,), versions=(1,))
    table.check_readers(one(reader))
    table.apply((PageEvent(kind, 2, A),))
    with pytest.raises(IntegrityError, match=r"page 2 at version 1, but the page is at version 2"):
        table.check_readers(one(reader))


def test_a_page_given_back_to_its_first_owner_still_refuses_the_old_reader():
    table = table_with(PageEvent(ALLOCATE, 0, A), PageEvent(EVICT, 0, A), PageEvent(ALLOCATE, 0, A))
    table.check_readers(one(row(versions=(3,))))
    with pytest.raises(IntegrityError, match=r"version 1.*version 3"):
        table.check_readers(one(row(versions=(1,))))


def test_writing_somebody_elses_page_is_refused_even_at_the_right_version():
    table = table_with(PageEvent(ALLOCATE, 0, A), PageEvent(ALLOCATE, 1, B))
    with pytest.raises(IntegrityError, match="would write page 1"):
        table.check_readers(
            PlanRows.of((row(pages=(0, 1), versions=(1, 1), start=250, tokens=10),))
        )
    with pytest.raises(IntegrityError, match="would write page 0"):
        table.check_readers(one(row(owner=B)))


def test_reading_somebody_elses_page_at_its_version_is_allowed():
    # What prefix sharing needs: only the pages from `start` on are written.
    table = table_with(PageEvent(ALLOCATE, 0, A), PageEvent(ALLOCATE, 1, B))
    table.check_readers(
        PlanRows.of((row(owner=B, pages=(0, 1), versions=(1, 1), start=256, tokens=1),))
    )


def test_a_shared_page_is_read_at_its_version_and_written_by_nobody():
    table = table_with(PageEvent(ALLOCATE, 0, A), PageEvent(ALLOCATE, 1, B))
    private = table.digest()
    table.apply((PageEvent(SHARE, 0, A),))
    assert (table.version(0), table.owner(0)) == (1, SHARED)
    assert table.digest() != private
    reader = row(owner=B, pages=(0, 1), versions=(1, 1), start=256, tokens=1)
    table.check_readers(one(reader))
    for owner in (A, B, SHARED):
        with pytest.raises(IntegrityError, match="would write page 0"):
            table.check_readers(one(row(owner=owner, start=255, tokens=1)))
    table.apply((PageEvent(EVICT, 0, SHARED),))
    with pytest.raises(IntegrityError, match="page 0 at version 1, but the page is at version 2"):
        table.check_readers(one(reader))


def test_a_page_of_nobody_is_not_written_by_nobody():
    with pytest.raises(IntegrityError, match="would write page 3"):
        table_with().check_readers(PlanRows.of((row(owner=NOBODY, pages=(3,), versions=(0,)),)))


@pytest.mark.parametrize(
    "bad",
    [
        row(tokens=257),
        row(pages=(0, 1), versions=(1,)),
        row(pages=(), versions=()),
        row(pages=(-1,), versions=(0,)),
        row(pages=(4,), versions=(0,)),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(bad):
    with pytest.raises(IntegrityError, match="admission 0, choice 0"):
        table_with(PageEvent(ALLOCATE, 0, A)).check_readers(PlanRows.of((bad,)))


def test_a_row_that_is_refused_is_named_wherever_it_stands():
    table = table_with(*(PageEvent(ALLOCATE, page, A) for page in range(4)))
    rows = [Row(place, 0, A, 700, (1,), (0, 1, 2), (1, 1, 1), 1) for place in range(5)]
    table.check_readers(PlanRows.of(rows))
    for place in range(5):
        for change in (
            {"pages": (0, 1, 4)},
            {"versions": (2, 1, 1)},
            {"versions": (1, 1, 0)},
            {"version_id": B},
            {"start": 768},
        ):
            wrong = list(rows)
            wrong[place] = msgspec.structs.replace(rows[place], **change)
            with pytest.raises(IntegrityError, match=f"admission {place}, choice 0"):
                table.check_readers(PlanRows.of(wrong))


@pytest.mark.parametrize(
    "event",
    [
        PageEvent(ALLOCATE, 0, B),
        PageEvent(EVICT, 0, B),
        PageEvent(EVICT, 1, A),
        PageEvent(NAN, 1, A),
        PageEvent(NAN, 0, B),
        PageEvent(2, 0, A),
        PageEvent(ALLOCATE, 1, NOBODY),
        PageEvent(ALLOCATE, 1, SHARED),
        PageEvent(SHARE, 0, B),
        PageEvent(SHARE, 0, SHARED),
        PageEvent(SHARE, 1, A),
        PageEvent(SHARE, 1, NOBODY),
        PageEvent(EVICT, 0, SHARED),
        PageEvent(ALLOCATE, 4, A),
        PageEvent(ALLOCATE, -1, A),
        PageEvent(9, 0, A),
        PageEvent(-1, 0, A),
        PageEvent(RELOAD, 0, A),
        PageEvent(RELOAD, ALL_PAGES, A),
    ],
)
def test_events_that_cannot_be_are_refused_and_change_nothing(event):
    table = table_with(PageEvent(ALLOCATE, 0, A))
    before = table.full_digest()
    with pytest.raises(IntegrityError, match="page"):
        table.apply((event,))
    assert table.full_digest() == before


EVENTS = (
    PageEvent(ALLOCATE, 0, A),
    PageEvent(ALLOCATE, 1, B),
    PageEvent(NAN, 1, B),
    PageEvent(NAN, 0, A),
    PageEvent(EVICT, 1, B),
)


def test_equal_events_give_equal_digests_however_they_are_batched():
    whole, single = VersionTable(4), VersionTable(4)
    whole.apply(EVENTS)
    for event in EVENTS:
        single.apply((event,))
    assert whole.digest() == single.digest()
    assert whole.full_digest() == single.full_digest()
    assert first_difference(whole.snapshot(), single.snapshot()) is None


@pytest.mark.parametrize("dropped", [2, 3, 4])
def test_a_dropped_event_changes_the_digest_and_the_page_is_named(dropped):
    whole = table_with(*EVENTS)
    lossy = table_with(*(event for i, event in enumerate(EVENTS) if i != dropped))
    assert whole.digest() != lossy.digest()
    page = EVENTS[dropped].page
    assert f"page {page} is at version" in first_difference(whole.snapshot(), lossy.snapshot())


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_dropped_allocation_is_refused_at_the_next_event_of_the_page(dropped):
    with pytest.raises(IntegrityError, match=f"page {dropped}"):
        table_with(*(event for i, event in enumerate(EVENTS) if i != dropped))


def test_a_lost_event_is_never_forgotten():
    # After the loss both tables get the same events, and even their pages could be made to agree.
    first, nan = PageEvent(ALLOCATE, 0, A), PageEvent(NAN, 0, A)
    whole = table_with(first, nan, nan)
    other = table_with(first, PageEvent(EVICT, 0, A), first)
    assert whole.snapshot() == other.snapshot()
    for event in (
        PageEvent(EVICT, 0, A),
        PageEvent(RELOAD, ALL_PAGES, 0),
        PageEvent(ALLOCATE, 0, B),
    ):
        whole.apply((event,))
        other.apply((event,))
        assert whole.digest() != other.digest()


def test_damage_without_an_event_shows_in_the_full_digest_and_after_the_next_change():
    good, damaged = table_with(*EVENTS), table_with(*EVENTS)
    damaged._versions[0] += 1
    assert good.digest() == damaged.digest()
    assert good.full_digest() != damaged.full_digest()
    for table in (good, damaged):
        table.apply((PageEvent(NAN, 0, A),))
    assert good.digest() != damaged.digest()


def test_tables_of_different_size_or_owner_differ():
    assert VersionTable(4).digest() != VersionTable(5).digest()
    left, right = table_with(PageEvent(ALLOCATE, 0, A)), table_with(PageEvent(ALLOCATE, 0, B))
    assert left.digest() != right.digest()
    assert "4 pages here, 5 there" in first_difference(
        VersionTable(4).snapshot(), VersionTable(5).snapshot()
    )


def test_a_reload_wants_an_idle_cache():
    with pytest.raises(IntegrityError, match=r"drain before a reload"):
        table_with(PageEvent(ALLOCATE, 3, A), PageEvent(RELOAD, ALL_PAGES, 0))


def test_version_ids_tell_request_seed_and_choice_apart_and_are_pinned():
    ids = [version_id("a", 1), version_id("b", 1), version_id("a", 2), version_id("a", 1, 1)]
    assert len(set(ids)) == 4
    assert all(0 < identity < 2**64 for identity in ids)
    assert version_id("request-1", 42, 3) == PINNED
    version_id("\ud800", 2**63 - 1)  # any text a client may send


PINNED = 17785435553618930524


events = st.lists(
    st.tuples(st.sampled_from([ALLOCATE, EVICT, NAN, SHARE]), st.integers(0, 3)),
    max_size=30,
)


@given(events, st.data())
@settings(max_examples=150, deadline=None)
def test_two_ranks_differ_in_digest_exactly_when_their_events_differ(steps, data):
    """Legal histories, one of them mutated at one place: refused, or another digest for good."""
    table, legal = VersionTable(4), []
    for kind, page in steps:
        owner = A if table.owner(page) == NOBODY else table.owner(page)
        event = PageEvent(kind, page, owner)
        try:
            table.apply((event,))
        except IntegrityError:
            continue
        legal.append(event)
    assert table_with(*legal).digest() == table.digest()
    if not legal:
        return
    at = data.draw(st.integers(0, len(legal) - 1))
    other = data.draw(st.sampled_from([None, *EVENTS]))
    if other == legal[at]:
        return
    mutated = [*legal[:at], *([] if other is None else [other]), *legal[at + 1 :]]
    if mutated == legal:
        return
    with contextlib.suppress(IntegrityError):  # refused outright is as good
        assert table_with(*mutated).digest() != table.digest()
