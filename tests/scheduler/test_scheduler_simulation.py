"""Random loads: answers equal those computed alone, and every plan keeps the invariants."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.some_slow import some_slow
from tests.scheduler.simulated.answers import answer_alone, make_request
from tests.scheduler.simulated.rank import FakeRank
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tpdet.cache.versions import SHARED
from tpdet.control.plan import EVICT, StepPlan
from tpdet.errors import IntegrityError, OverloadedError
from tpdet.kernels.order import PAGE_TOKENS


def random_request(random_: random.Random, name: str, longest: int):
    length = random_.choice([1, 2, 9, 255, 256, 257, random_.randint(1, longest)])
    max_tokens = random_.choice([0, 1, 2, 12, random_.randint(1, 60)])
    return make_request(
        name,
        min(length, longest),
        random_.randrange(1000),
        n=random_.choice([1, 1, 1, 1, 2, 3]),
        seed=random_.randrange(2**63),
        max_tokens=max_tokens,
        min_tokens=random_.randint(0, max_tokens) if random_.random() < 0.2 else 0,
        ignore_eos=random_.random() < 0.5,
        stop_token_ids=(3, 4) if random_.random() < 0.2 else (),
        presence_penalty=0.5 if random_.random() < 0.1 else 0.0,
        prompt_logprobs=random_.choice([None, None, None, 0, 2]),
    )


def check_plan(plan: StepPlan, sim: Simulation, computed: dict) -> None:
    policy = sim.scheduler.policy
    keys = [(row.admission, row.choice) for row in plan.rows]
    assert keys == sorted(set(keys))
    assert 0 < sum(len(row.token_ids) for row in plan.rows) <= policy.max_num_batched_tokens
    assert len(policy.running) <= policy.max_num_seqs
    pages = [page for row in plan.rows for page in row.pages]
    table = policy.page_manager.table
    own = [page for page in pages if table.owner(page) != SHARED]
    assert len(own) == len(set(own)), "two rows share a page that was not shared"
    computed.update((event.version_id, 0) for event in plan.events if event.kind == EVICT)
    resumes = bool(sim.page_salts)  # a page was shared before
    for row in plan.rows:
        end = row.start + len(row.token_ids)
        assert len(row.pages) == len(row.versions) == -(-end // PAGE_TOKENS)
        # From a cached page a sequence goes on behind it, with nothing computed before.
        assert row.start == computed.get(row.version_id, 0) or (
            resumes and row.start % PAGE_TOKENS == 0
        ), "positions are contiguous, from 0 after a preemption"
        assert 0 <= row.logits <= len(row.token_ids)
        computed[row.version_id] = end


def run_load(
    sim: Simulation,
    random_: random.Random,
    count: int,
    longest: int,
    ahead: float = 0.0,
    make=random_request,
) -> tuple:
    """Random arrivals, aborts, failures and heartbeats; all requests, and those cut short.

    ahead: how often the next step is planned while one is in flight. make: draws a request.
    """
    requests, cut, computed = [], set(), {}
    while len(requests) < count or sim.scheduler.has_work:
        while len(requests) < count and random_.random() < 0.5:
            request = make(random_, f"r{len(requests)}", longest)
            try:
                sim.add(request)
            except OverloadedError:
                break
            requests.append(request)
        plan = None if sim.pending else sim.begin()
        if plan is not None:
            check_plan(plan, sim, computed)
        if requests and random_.random() < 0.08:
            name = random_.choice(requests[-20:]).request_id
            cut.add(name)
            if random_.random() < 0.5:
                sim.scheduler.abort(name)
            else:
                sim.scheduler.fail(name, "numerical_error", "NaN")
        following = sim.begin(ahead=True) if sim.pending and random_.random() < ahead else None
        if following is not None:
            check_plan(following, sim, computed)
        if sim.pending:
            sim.scheduler.check_integrity()
            sim.end(sim.pending[0])
        elif random_.random() < 0.5:
            sim.send(sim.scheduler.heartbeat())
        assert len(sim.plans) < 200 * count + 5000, "livelock"
    return requests, cut


LOADS = {
    1: {"num_pages": 4, "max_num_batched_tokens": 48},
    2: {"num_pages": 3, "max_num_batched_tokens": 700, "max_queue": 5},
    3: {"num_pages": 40, "max_num_batched_tokens": 300, "max_num_seqs": 24},
    4: {"num_pages": 6, "max_num_batched_tokens": 130, "preempt_every": 7},
    5: {"num_pages": 9, "max_num_batched_tokens": 17, "max_num_seqs": 3},
}
"""Settings by the seed of their load."""
AHEAD = (0.0, 0.7, 1.0)


@pytest.mark.parametrize(
    ("seed", "ahead"),
    some_slow([(1, 0.7), (2, 1.0), (3, 0.0), (4, 0.7), (5, 1.0)], itertools.product(LOADS, AHEAD)),
)
def test_under_random_load_every_answer_is_the_one_computed_alone(seed, ahead):
    random_, settings_ = random.Random(seed), LOADS[seed]
    sim = Simulation(make_scheduler(**settings_))
    requests, cut = run_load(sim, random_, 130, longest=600, ahead=ahead)
    complete = [request for request in requests if request.request_id not in cut]
    assert len(complete) > 60
    for request in complete:
        sim.check_answer(request)
    for key, answer in sim.answers.items():
        if key[0] in cut:  # what was heard before the end is right as far as it goes
            request = next(r for r in requests if r.request_id == key[0])
            assert answer.tokens == answer_alone(request, key[1]).tokens[: len(answer.tokens)]
    statistics = sim.scheduler.statistics()
    if settings_["num_pages"] < 7:
        assert statistics.preemptions > 0
    totals = statistics.totals
    ended = statistics.requests_finished + totals.requests_aborted + totals.requests_failed
    assert ended == totals.requests_added == 130
    sim.check_idle()


@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(3, 8),
    budget=st.integers(1, 600),
    seats=st.integers(1, 9),
    every=st.sampled_from([0, 0, 1, 3]),
    count=st.integers(1, 9),
    ahead=st.sampled_from([0.0, 0.5, 1.0]),
    others=st.sampled_from([0, 1, 2, 10]),
)
@settings(max_examples=60, deadline=None)
def test_no_setting_breaks_an_invariant_or_starves_anybody(
    seed, num_pages, budget, seats, every, count, ahead, others
):
    sim = Simulation(
        make_scheduler(
            others,
            num_pages=num_pages,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            preempt_every=every,
        )
    )
    requests, cut = run_load(sim, random.Random(seed), count, longest=300, ahead=ahead)
    for request in requests:
        if request.request_id not in cut:
            sim.check_answer(request)
    sim.check_idle()


def test_the_same_load_gives_the_same_plans():
    runs = []
    for _ in range(2):
        sim = Simulation(make_scheduler(num_pages=4))
        run_load(sim, random.Random(7), 30, longest=500, ahead=0.5)
        runs.append(sim.plans)
    assert runs[0] == runs[1]


def test_a_rank_that_loses_any_one_event_refuses_a_step():
    """Negative control for the digest: for each event of a run, drop it on one rank."""
    sim = Simulation(make_scheduler(num_pages=3, max_num_batched_tokens=600))
    run_load(sim, random.Random(3), 12, longest=300)
    events = [(i, j) for i, plan in enumerate(sim.plans) for j in range(len(plan.events))]
    assert len(events) > 20
    for at, dropped in events:
        table = FakeRank(3).table
        with pytest.raises((IntegrityError, AssertionError)):
            for i, plan in enumerate(sim.plans[: at + 1]):
                table.apply(e for j, e in enumerate(plan.events) if (i, j) != (at, dropped))
                assert table.digest() == plan.table_digest
