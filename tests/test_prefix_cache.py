"""The prefix cache by itself and in the scheduler: who shares what, and who never does."""

from dataclasses import replace

import pytest

from tests.scheduler_simulation import Simulation, make_prompt, make_scheduler
from tpdet.cache.prefix import PrefixChain, PrefixIndex, prefix_domain
from tpdet.cache.versions import SHARED, version_id
from tpdet.errors import IntegrityError
from tpdet.plan import ALLOCATE, EVICT, NAN, RELOAD, SHARE

LONG = tuple(10 + (i * i + i // 7) % 40 for i in range(1200))
OTHER = tuple(10 + (3 * i * i + i // 5) % 40 for i in range(1200))


def simulation(**settings) -> Simulation:
    return Simulation(make_scheduler(**{"prefix_identity": b"model", "num_pages": 16} | settings))


def ask(name, ids, **params):
    return make_prompt(name, ids, **{"max_tokens": 3, "ignore_eos": True, **params})


def serve(sim, *requests, ahead=False):
    """Run the requests to their end; each must be answered as when alone."""
    for request in requests:
        sim.add(request)
    sim.run(ahead=ahead)
    for request in requests:
        sim.check_answer(request)
    sim.check_idle()


def hits(sim):
    return sim.scheduler.statistics().totals.prefix_hit_tokens


def cached_tokens(sim, request):
    before = hits(sim)
    serve(sim, request)
    return hits(sim) - before


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (LONG[:700], 512),
        (LONG[:512], 256),  # its last page is computed: the last token must be
        (LONG[:513], 512),
        (LONG[:256], 0),
        (LONG[:257], 256),
        (LONG[:1000], 512),
        ((*LONG[:300], 9, *LONG[301:700]), 256),
        ((9, *LONG[1:700]), 0),
    ],
)
def test_the_longest_equal_prefix_of_whole_pages_is_read(ids, found):
    sim = simulation()
    serve(sim, ask("a", LONG[:600]))
    assert cached_tokens(sim, ask("b", ids)) == found


def test_a_page_of_equal_tokens_at_another_place_is_not_read():
    sim = simulation()
    serve(sim, ask("a", LONG[:600]))
    assert cached_tokens(sim, ask("b", LONG[256:600])) == 0
    assert cached_tokens(sim, ask("c", (*OTHER[:256], *LONG[256:600]))) == 0


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {}, 512),
        ({"tenant": "t"}, {"tenant": "t"}, 512),
        ({"tenant": "t"}, {"tenant": "u"}, 0),
        ({"tenant": "t"}, {}, 0),
        ({"salt": "s"}, {"salt": "s"}, 512),
        ({"salt": "s"}, {"salt": "r"}, 0),
        ({"tenant": "x"}, {"salt": "x"}, 0),
        ({"tenant": "ab", "salt": "c"}, {"tenant": "a", "salt": "bc"}, 0),
        ({"tenant": "\ud800"}, {"tenant": "\ud800"}, 512),
    ],
)
def test_only_equal_salts_share(first, second, found):
    sim = simulation()
    serve(sim, ask("a", LONG[:600], **first))
    assert cached_tokens(sim, ask("b", LONG[:600], **second)) == found


def test_without_the_tenants_salt_tenants_would_share(monkeypatch):
    """Negative control for the salt."""
    from tpdet.scheduler import prefixes

    monkeypatch.setattr(prefixes, "prefix_domain", lambda identity, tenant, salt: bytes(32))
    sim = simulation()
    serve(sim, ask("a", LONG[:600], tenant="t"))
    with pytest.raises(AssertionError, match="a page of another tenant"):
        serve(sim, ask("b", LONG[:600], tenant="u"))


def test_requests_with_prompt_scores_fill_the_cache_and_never_read_it():
    sim = simulation()
    assert cached_tokens(sim, ask("a", LONG[:600], prompt_logprobs=0)) == 0
    assert cached_tokens(sim, ask("b", LONG[:600], prompt_logprobs=0, n=2)) == 0
    assert cached_tokens(sim, ask("c", LONG[:600])) == 512


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [64, 4000])
def test_choices_wait_for_the_prompt_of_the_first_and_share_it(ahead, budget):
    sim = simulation(max_num_batched_tokens=budget)
    request = ask("a", LONG[:600], n=5, max_tokens=30)
    serve(sim, request, ahead=ahead)
    totals = sim.scheduler.statistics().totals
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens) == (3000, 4 * 512)
    assert max(len({p for r in plan.rows for p in r.pages}) for plan in sim.plans) == 2 + 5


def test_requests_that_arrive_together_compute_a_shared_prefix_once():
    sim = simulation(max_num_batched_tokens=4000)
    serve(sim, *(ask(f"r{i}", (*LONG[:520], *OTHER[:i])) for i in range(6)))
    assert hits(sim) == 5 * 512


@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_who_waits_for_a_page_goes_on_when_its_maker_is_gone(end):
    sim = simulation(max_num_batched_tokens=300)
    first, second = ask("a", LONG[:600]), ask("b", LONG[:600])
    sim.add(first)
    sim.add(second)
    sim.step()
    if end == "abort":
        sim.scheduler.abort("a")
    elif end == "fail":
        sim.scheduler.fail("a", "numerical_error", "NaN")
    else:
        sim.scheduler.preempt_all()
    sim.run()
    sim.check_answer(second)
    assert hits(sim) == (512 if end == "preempt" else 0)
    sim.check_idle()


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


def test_a_preempted_sequence_finds_its_own_pages_again():
    sim = simulation()
    request = ask("a", LONG[:600], max_tokens=6)
    sim.add(request)
    while sim.answers.get(("a", 0)) is None:
        sim.step()
    sim.scheduler.preempt_all()
    plan = sim.begin()
    assert [(row.start, len(row.token_ids)) for row in plan.rows] == [(512, 64)]
    sim.end(plan)
    sim.run()
    sim.check_answer(request)
    sim.check_idle()


def test_an_answer_tells_its_cached_tokens_once():
    sim, told = simulation(), []
    sim.hear = told.append
    for name in "ab":
        sim.add(ask(name, LONG[:600]))
        sim.run()
    assert [output.cached_tokens for output in told] == [0, 0, 0, 512, 0, 0]
    sim.add(ask("c", LONG[:600], max_tokens=0))
    sim.run()
    assert (told[-1].token_id, told[-1].cached_tokens) == (-1, 512)


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


def test_without_an_identity_nothing_is_shared():
    sim = simulation(prefix_identity=None)
    serve(sim, ask("a", LONG[:600], n=2))
    assert hits(sim) == 0 and sim.scheduler.statistics().pages_cached == 0
    assert not [e for plan in sim.plans for e in plan.events if e.kind == SHARE]


def test_keys_depend_on_everything_before_and_are_pinned():
    chain = PrefixChain(prefix_domain(b"m", "t", "c"))
    same = PrefixChain(prefix_domain(b"m", "t", "c"))
    assert chain.key(LONG, 1) == same.key(LONG, 1)
    keys = [chain.key(LONG, 0), chain.key(LONG, 1)]
    for identity, tenant, salt in [(b"n", "t", "c"), (b"m", "u", "c"), (b"m", "t", "d")]:
        keys.append(PrefixChain(prefix_domain(identity, tenant, salt)).key(LONG, 0))
    keys.append(PrefixChain(prefix_domain(b"m", "t", "c")).key((*OTHER[:256], *LONG[256:]), 1))
    assert len({key.key for key in keys}) == 6
    assert all(len(key.key) == 32 for key in keys)
    assert keys[1].key.hex()[:16] == PINNED


PINNED = "50c4636601b5cdda"


def test_a_collision_of_keys_is_refused_by_the_token_ids():
    index, chain = PrefixIndex(), PrefixChain(bytes(32))
    mine = chain.key(LONG, 0)
    theirs = replace(PrefixChain(bytes(32)).key(OTHER, 0), key=mine.key)
    other_domain = replace(mine, domain=bytes([1] * 32))
    entry = index.put(mine, 3, None)
    assert index.find(mine, None) is entry
    assert index.find(theirs, None) is None
    assert index.find(other_domain, None) is None
    assert index.find(mine, entry) is None, "the same page behind another"


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index.take(0),
        lambda index: index.give(0),
        lambda index: index._idle.__setitem__(0, None),
        lambda index: index._by_page.pop(0),
        lambda index: index._entries.clear(),
        lambda index: index._readers.pop(1),
    ],
)
def test_check_integrity_sees_damage(damage):
    sim = simulation()
    sim.add(ask("a", LONG[:600], max_tokens=30))
    for _ in range(12):
        sim.step()
    sim.scheduler.check_integrity()
    damage(sim.scheduler.roster.ledger.prefixes.index)
    with pytest.raises(IntegrityError):
        sim.scheduler.check_integrity()
