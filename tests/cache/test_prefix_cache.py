"""The prefix cache by itself and in the scheduler: who shares what, and who never does."""

import pytest

from tests.cache.prefix_requests import (
    LONG,
    OTHER,
    ask,
    cached_tokens,
    hits,
    serve,
    simulation,
)
from tpdet.control.plan import SHARE


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
        sim.preempt_all()
    sim.run()
    sim.check_answer(second)
    assert hits(sim) == (512 if end == "preempt" else 0)
    sim.check_idle()


def test_a_preempted_sequence_finds_its_own_pages_again():
    sim = simulation()
    request = ask("a", LONG[:600], max_tokens=6)
    sim.add(request)
    while sim.answers.get(("a", 0)) is None:
        sim.step()
    sim.preempt_all()
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


def test_without_an_identity_nothing_is_shared():
    sim = simulation(prefix_identity=None)
    serve(sim, ask("a", LONG[:600], n=2))
    assert hits(sim) == 0 and sim.scheduler.statistics().pages_cached == 0
    assert not [e for plan in sim.plans for e in plan.events if e.kind == SHARE]
