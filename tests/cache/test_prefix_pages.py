"""The pages of cached prefixes: when they are shared, evicted, forgotten, and never read."""

import pytest

from tests.cache.prefix_requests import LONG, OTHER, ask, cached_tokens, serve, simulation
from tpdet.cache.versions import SHARED, version_id
from tpdet.control.plan import ALLOCATE, EVICT, NAN, RELOAD, SHARE
from tpdet.errors import IntegrityError


def test_a_page_is_shared_only_once_logits_behind_it_were_committed():
    sim = simulation(max_num_batched_tokens=300)
    sim.add(ask("a", LONG[:600]))
    shared = []
    for _ in range(3):
        plan = sim.begin()
        shared.append([e.page for e in plan.events if e.kind == SHARE])
        sim.end(plan)
    assert shared == [[], [], [0, 1]]


@pytest.mark.parametrize("position", [3, 400, 599])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_fault_wrote_is_read_by_nobody(position, ahead):
    sim = simulation(max_num_batched_tokens=256)
    broken = ask("broken", LONG[:600], max_tokens=50)
    sim.broken = frozenset({(version_id("broken", 1), position)})
    sim.add(broken)
    others = [ask(f"r{i}", LONG[: 500 + 100 * i]) for i in range(3)]
    for request in others:
        sim.add(request)
    sim.run(ahead=ahead)
    assert sim.failures["broken"].code == "numerical_error"
    for request in others:
        sim.check_answer(request)
    assert NAN in [e.kind for plan in sim.plans for e in plan.events]
    sim.check_idle()


def test_a_later_nan_takes_a_requests_pages_out_of_the_cache_but_not_from_their_readers():
    sim = simulation(max_num_batched_tokens=1000)
    serve(sim, ask("a", LONG[:600]))
    reader, failing = ask("b", LONG[:600], max_tokens=9), ask("c", LONG[:600], max_tokens=9)
    sim.add(reader)
    sim.add(failing)
    sim.step()
    sim.scheduler.fail("c", "numerical_error", "NaN")
    assert sim.scheduler.statistics().pages_cached == 0
    assert cached_tokens(sim, ask("d", LONG[:600])) == 0, "the pages could be found still"
    sim.run()
    sim.check_answer(reader)
    sim.check_idle()
    assert cached_tokens(sim, ask("e", LONG[:600])) == 512


def test_the_longest_unread_page_is_evicted_first_and_deeper_ones_before_their_parents():
    sim = simulation(num_pages=5)
    serve(sim, ask("a", LONG[:600]))
    serve(sim, ask("b", OTHER[:600]))
    assert sim.scheduler.statistics().pages_cached == 4
    assert cached_tokens(sim, ask("c", LONG[:600])) == 512, "read again, so released again"
    begun = len(sim.plans)
    serve(sim, ask("d", tuple(reversed(LONG[:800]))))
    events = [e for plan in sim.plans[begun:] for e in plan.events]
    evicted = [e.page for e in events if e.kind == EVICT and e.version_id == SHARED]
    # Pages of "b" went, the deeper first, then the deeper one of "a".
    assert evicted == [3, 2, 1]
    assert cached_tokens(sim, ask("e", LONG[:600])) == 256


def test_a_freed_page_is_evicted_before_it_is_given_again():
    sim = simulation(num_pages=3)
    serve(sim, ask("a", LONG[:600]))
    begun = len(sim.plans)
    serve(sim, ask("b", OTHER[:600]))
    events = [(e.kind, e.page) for plan in sim.plans[begun:] for e in plan.events]
    assert events[:5] == [(ALLOCATE, 2), (EVICT, 1), (ALLOCATE, 1), (EVICT, 0), (ALLOCATE, 0)]


def test_statistics_tell_used_free_and_cached_pages():
    sim = simulation()
    sim.add(ask("a", LONG[:600], max_tokens=30))
    for _ in range(12):
        sim.step()
    now = sim.scheduler.statistics()
    assert (now.pages_used, now.pages_free, now.pages_cached) == (3, 13, 0)
    sim.run()
    now = sim.scheduler.statistics()
    assert (now.pages_used, now.pages_free, now.pages_cached) == (0, 16, 2)


def test_a_reload_forgets_every_page_and_wants_a_drained_scheduler():
    sim = simulation()
    sim.add(ask("a", LONG[:600]))
    with pytest.raises(IntegrityError, match="drain first"):
        sim.scheduler.reload(b"new")
    sim.run()
    sim.scheduler.reload(b"new")
    beat = sim.scheduler.heartbeat()
    assert [e.kind for e in beat.events][-3:] == [EVICT, EVICT, RELOAD]
    sim.send(beat)
    assert cached_tokens(sim, ask("b", LONG[:600])) == 0
    assert cached_tokens(sim, ask("c", LONG[:600])) == 512
    sim.scheduler.forget_prefixes()
    assert cached_tokens(sim, ask("d", LONG[:600])) == 0
