"""Steps planned ahead of the results of the one in flight."""

import pytest

from tests.scheduler.simulated.answers import answer_alone, make_request
from tests.scheduler.simulated.requests import keys, simulation


def test_a_step_ahead_names_the_tokens_that_the_step_in_flight_draws():
    sim = simulation(*(make_request(c, 5 + i, max_tokens=9) for i, c in enumerate("abc")))
    sim.step()
    first, second = sim.begin(), sim.begin(ahead=True)
    assert all(row.token_ids[0] >= 0 for row in first.rows)
    assert [row.token_ids for row in second.rows] == [(-1,), (-2,), (-3,)]
    assert sim.begin(ahead=True) is None, "two steps in flight at most"
    sim.end(first)
    third = sim.begin(ahead=True)
    assert [row.start for row in third.rows] == [7, 8, 9]


def test_no_step_is_planned_past_the_last_token():
    sim = simulation(make_request("a", max_tokens=2, ignore_eos=True))
    first, second = sim.begin(), sim.begin(ahead=True)
    assert sim.begin(ahead=True) is None
    sim.end(first)
    assert sim.begin(ahead=True) is None
    sim.end(second)
    assert len(sim.answers["a", 0].tokens) == 2
    sim.check_idle()


def crowd(others, **params):
    """Sequence 0 with these parameters and `others` without, all of them decoding."""
    requests = [
        make_request(f"r{i}", 3 + i, max_tokens=12, ignore_eos=True, **(params if i == 0 else {}))
        for i in range(others + 1)
    ]
    sim = simulation(*requests, max_num_seqs=20, others_per_absent=10, max_num_batched_tokens=512)
    sim.step()
    return sim, requests


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.2}])
def test_who_depends_on_results_is_absent_from_the_step_ahead_and_in_the_next(params):
    sim, requests = crowd(10, **params)
    everyone = [(i, 0) for i in range(11)]
    flying = sim.begin()
    for expected in (everyone[1:], everyone) * 3:
        ahead = sim.begin(ahead=True)
        assert keys(ahead) == expected
        own = [row.token_ids[0] for row in ahead.rows if row.admission == 0]
        assert all(token >= 0 for token in own), "its last token is known by now"
        sim.end(flying)
        flying = ahead
    sim.run(ahead=True)
    for request in requests:
        sim.check_answer(request)


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"n": 2, "presence_penalty": 0.5}])
def test_where_too_few_others_go_on_the_step_waits_for_all(params):
    sim, requests = crowd(9, **params)
    plan = sim.begin()
    assert len(plan.rows) == 9 + params.get("n", 1)
    assert sim.begin(ahead=True) is None
    sim.end(plan)
    sim.run(ahead=True)
    assert {row.admission for row in sim.plans[-1].rows} == set(range(10))
    for request in requests:
        sim.check_answer(request)


def test_the_absent_keep_their_share_of_the_budget():
    """Else those let in meanwhile would leave one of them without a token in the next step."""
    penalised = make_request("a", 1, max_tokens=9, ignore_eos=True, presence_penalty=1.0)
    others = [make_request(c, 1, max_tokens=9, ignore_eos=True) for c in "bcd"]
    sim = simulation(penalised, *others, max_num_batched_tokens=3)
    first, second = sim.begin(), sim.begin(ahead=True)
    assert keys(first) == [(0, 0), (1, 0), (2, 0)] and keys(second) == [(1, 0), (2, 0)]
    assert len(sim.scheduler.policy.running) == 3
    sim.end(first)
    sim.end(second)
    sim.run(ahead=True)
    for request in (penalised, *others):
        sim.check_answer(request)


@pytest.mark.parametrize(
    ("params", "starts"), [({"presence_penalty": 1.0}, [0, 64, 128]), ({"prompt_logprobs": 0}, [0])]
)
def test_a_prompt_in_parts_runs_ahead_unless_it_is_scored(params, starts):
    request = make_request("a", 150, max_tokens=2, **params)
    sim = simulation(request)
    plans = [sim.begin(), sim.begin(ahead=True)]
    if plans[1] is not None:
        sim.end(plans[0])
        plans.append(sim.begin(ahead=True))
    assert [plan.rows[0].start for plan in plans if plan is not None] == starts
    sim.run(ahead=True)
    sim.check_answer(request)


def test_a_sequence_that_stops_keeps_its_pages_until_the_step_ahead_is_done():
    free = answer_alone(make_request("a", max_tokens=50, ignore_eos=True), 0).tokens
    stopping = make_request("a", max_tokens=50, ignore_eos=True, stop_token_ids=(free[3],))
    sim = simulation(stopping, make_request("b", max_tokens=50, ignore_eos=True))
    while ("a", 0) not in sim.answers or sim.answers["a", 0].finish is None:
        sim.run_one(ahead=True)
    assert keys(sim.pending[0]) == [(0, 0), (1, 0)], "a row that is computed for nobody"
    assert sim.scheduler.statistics().pages_used == 2
    sim.run_one(ahead=True)
    assert sim.scheduler.statistics().pages_used == 1
    sim.run(ahead=True)
    sim.check_answer(stopping)
    sim.check_idle()
