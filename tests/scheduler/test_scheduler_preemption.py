"""Preemption: who goes first when pages run out, and that no answer tells of it."""

import pytest

from tests.scheduler.simulated.answers import make_request
from tests.scheduler.simulated.requests import keys, simulation
from tpdet.cache.versions import version_id
from tpdet.control.plan import ALLOCATE, EVICT


def test_the_latest_goes_first_when_pages_run_out_and_resumes_with_the_same_tokens():
    requests = [make_request(c, 250, seed=3, max_tokens=30, ignore_eos=True) for c in "abc"]
    sim = simulation(*requests, num_pages=4, max_num_batched_tokens=1000)
    sim.run()
    for request in requests:
        sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions == 1
    evictions = [
        (plan.step, e.version_id) for plan in sim.plans for e in plan.events if e.kind == EVICT
    ]
    assert evictions[0][1] == version_id("c", 3)
    sim.check_idle()


def test_within_a_request_the_highest_choice_is_preempted_first():
    request = make_request("a", 250, n=3, max_tokens=30, ignore_eos=True)
    sim = simulation(request, num_pages=4, max_num_batched_tokens=1000)
    sim.run()
    sim.check_answer(request)
    first = next(e for plan in sim.plans for e in plan.events if e.kind == EVICT)
    assert first.version_id == version_id("a", 1, 2)


def test_nobody_passes_the_head_of_the_line():
    # Four pages: "a" holds two, "big" wants three, "small" would fit but came later.
    sim = simulation(
        make_request("a", 300, max_tokens=3, ignore_eos=True),
        make_request("big", 700, max_tokens=2, ignore_eos=True),
        make_request("small", 5, max_tokens=2, ignore_eos=True),
        num_pages=4,
        max_num_batched_tokens=1000,
    )
    sim.run()
    order = list(dict.fromkeys(key for plan in sim.plans for key in keys(plan)))
    assert order == [(0, 0), (1, 0), (2, 0)]
    assert keys(sim.plans[0]) == [(0, 0)]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_forced_preemption_changes_no_answer_and_ends(every):
    requests = [
        make_request(c, 40 * i + 1, n=2, max_tokens=25, prompt_logprobs=0)
        for i, c in enumerate("abcdef")
    ]
    sim = simulation(*requests, preempt_every=every, num_pages=4)
    sim.run(limit=20_000)
    for request in requests:
        sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions > 10
    sim.check_idle()


def test_allocations_follow_the_evictions_they_reuse():
    sim = simulation(make_request("a", max_tokens=1), make_request("b", max_tokens=1), num_pages=1)
    sim.run()
    assert [(e.kind, e.page) for e in sim.plans[1].events] == [(EVICT, 0), (ALLOCATE, 0)]
