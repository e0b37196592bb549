"""Random loads that share prefixes: nobody reads another's, and every answer stays its own."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.some_slow import some_slow
from tests.scheduler.simulated.answers import make_prompt
from tests.scheduler.simulated.rank import NAN
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tests.scheduler.test_scheduler_simulation import run_load
from tpdet.cache import prefix
from tpdet.cache.prefix import PrefixIndex
from tpdet.cache.versions import VersionTable, version_id
from tpdet.control.plan import ALLOCATE, EVICT, SHARE
from tpdet.errors import IntegrityError

_draw = random.Random(11)
STEMS = [[_draw.randrange(10, 50) for _ in range(900)] for _ in range(2)]


def sharing_request(random_: random.Random, name: str, longest: int):
    """A request whose prompt is a stem's beginning, mostly with an end of its own."""
    stem = random_.choice(STEMS)
    cut = random_.choice([5, 256, 257, 300, 511, 512, 513, 600, longest])
    ids = stem[: min(cut, longest)]
    if random_.random() < 0.6:
        ids = [*ids, *(random_.randrange(10, 50) for _ in range(random_.randint(1, 90)))]
    return make_prompt(
        name,
        ids,
        tenant=random_.choice(["", "", "", "t"]),
        salt=random_.choice(["", "", "", "s"]),
        n=random_.choice([1, 1, 1, 2, 4]),
        seed=random_.randrange(2**63),
        max_tokens=random_.choice([0, 1, 2, 12, 40]),
        ignore_eos=random_.random() < 0.7,
        presence_penalty=0.5 if random_.random() < 0.1 else 0.0,
        prompt_logprobs=random_.choice([None] * 7 + [0]),
    )


class Faults(Simulation):
    """A simulation where now and then NAN is written for a request instead of a token."""

    def __init__(self, scheduler, random_: random.Random, share: float) -> None:
        super().__init__(scheduler)
        self._random, self._share = random_, share
        self.struck: set[str] = set()

    def add(self, request) -> None:
        super().add(request)
        if self._random.random() < self._share:
            choice = self._random.randrange(request.params.n)
            owner = version_id(request.request_id, request.params.seed, choice)
            position = self._random.randrange(len(request.prompt_token_ids) + 5)
            self.broken |= {(owner, position)}
            self.struck.add(request.request_id)


def run_and_check(sim: Faults, random_, count, longest, ahead):
    requests, cut = run_load(sim, random_, count, longest, ahead, sharing_request)
    for request in requests:
        if request.request_id not in cut and request.request_id not in sim.failures:
            sim.check_answer(request)
    assert {name for name in sim.failures if name not in sim.struck} <= cut
    sim.check_idle()
    sim.scheduler.forget_prefixes()
    sim.check_idle()
    assert sim.scheduler.statistics().pages_cached == 0
    pages = sim.scheduler.policy.page_manager
    assert pages.allocator.free_count == pages.num_pages
    assert not pages.prefixes._being_computed


LOADS = {
    1: {"num_pages": 5, "max_num_batched_tokens": 200},
    2: {"num_pages": 40, "max_num_batched_tokens": 700, "max_num_seqs": 24},
    3: {"num_pages": 8, "max_num_batched_tokens": 130, "preempt_every": 7},
}
"""Settings by the seed of their load."""


@pytest.mark.parametrize(
    ("seed", "ahead"),
    some_slow([(1, 0.7), (2, 0.0), (3, 1.0)], itertools.product(LOADS, (0.0, 0.7, 1.0))),
)
def test_under_random_load_with_shared_prefixes_answers_are_those_computed_alone(seed, ahead):
    random_, settings_ = random.Random(seed), LOADS[seed]
    scheduler = make_scheduler(prefix_identity=b"m", **settings_)
    sim = Faults(scheduler, random_, 0.05)
    run_and_check(sim, random_, 120, 700, ahead)
    statistics = scheduler.statistics()
    assert statistics.totals.prefix_hit_tokens > 5_000
    assert sim.struck and sim.failures
    if settings_["num_pages"] < 10:
        assert statistics.preemptions > 0


@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(4, 12),
    budget=st.sampled_from([1, 60, 256, 300, 1500]),
    seats=st.integers(1, 9),
    every=st.sampled_from([0, 0, 1, 3]),
    count=st.integers(1, 10),
    ahead=st.sampled_from([0.0, 0.5, 1.0]),
    key_bytes=st.sampled_from([0, 1, 32]),
)
@settings(max_examples=60, deadline=None)
def test_no_setting_breaks_an_invariant_even_where_keys_collide(
    seed, num_pages, budget, seats, every, count, ahead, key_bytes
):
    random_, real = random.Random(seed), prefix.page_key
    scheduler = make_scheduler(
        num_pages=num_pages,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        preempt_every=every,
        prefix_identity=b"m",
    )
    sim = Faults(scheduler, random_, 0.1)
    longest = 300 if budget < 60 else 700
    prefix.page_key = lambda *parts: real(*parts)[:key_bytes]
    try:
        run_and_check(sim, random_, count, longest, ahead)
    finally:
        prefix.page_key = real


@pytest.mark.parametrize("what", ["tokens", "parent"])
def test_without_the_comparison_colliding_keys_are_caught_by_the_answers(monkeypatch, what):
    """Negative control: what the comparison is for, with keys of no bytes."""

    def find(index, key, parent):
        entry = index._entries.get(key.key)
        return entry if entry is not None and index.same_tokens(entry, key) else None

    monkeypatch.setattr(prefix, "page_key", lambda *parts: b"")
    if what == "tokens":
        monkeypatch.setattr(PrefixIndex, "same_tokens", staticmethod(lambda entry, key: True))
    else:
        monkeypatch.setattr(PrefixIndex, "find", find)
    first, second = STEMS[0][:256], STEMS[1][:256]
    before = [*first, *second] if what == "parent" else first
    requests = [
        make_prompt("a", [*before, 9], max_tokens=2, ignore_eos=True),
        make_prompt("b", [*second, 9], max_tokens=2, ignore_eos=True),
    ]
    sim = Simulation(make_scheduler(prefix_identity=b"m"))
    with pytest.raises((AssertionError, IntegrityError)):
        for request in requests:
            sim.add(request)
            sim.run()
            sim.check_answer(request)


def test_the_simulation_sees_a_fault_that_was_shared():
    """Negative control: pages shared as soon as they are written, and a fault reaches others."""
    scheduler = make_scheduler(prefix_identity=b"m", max_num_batched_tokens=400)
    sim = Faults(scheduler, random.Random(1), 0.0)
    sim.broken = frozenset({(version_id("a", 1), 10)})
    sim.add(make_prompt("a", STEMS[0][:600], max_tokens=2))
    sim.step()
    (sequence,) = scheduler.policy.running
    scheduler.policy.page_manager.share(sequence, 256)
    sim.add(make_prompt("b", STEMS[0][:300], max_tokens=2))
    with pytest.raises(AssertionError, match="another's NaN"):
        sim.run()
    assert NAN in sim.ranks[0].store


def test_a_rank_that_loses_any_one_event_refuses_a_step():
    """Negative control for the digest, where pages are shared."""
    sim = Faults(make_scheduler(num_pages=6, prefix_identity=b"m"), random.Random(5), 0.1)
    run_load(sim, random.Random(3), 12, 600, 0.5, sharing_request)
    events = [(i, j) for i, plan in enumerate(sim.plans) for j in range(len(plan.events))]
    kinds = {sim.plans[i].events[j].kind for i, j in events}
    assert {ALLOCATE, EVICT, SHARE} <= kinds
    for at, dropped in events:
        table = VersionTable(6)
        with pytest.raises((IntegrityError, AssertionError)):
            for i, plan in enumerate(sim.plans[: at + 1]):
                table.apply(e for j, e in enumerate(plan.events) if (i, j) != (at, dropped))
                assert table.digest() == plan.table_digest


def test_the_same_load_gives_the_same_plans():
    runs = []
    for _ in range(2):
        scheduler = make_scheduler(prefix_identity=b"m", num_pages=6)
        sim = Faults(scheduler, random.Random(5), 0.1)
        run_load(sim, random.Random(7), 40, 600, 0.5, sharing_request)
        runs.append(sim.plans)
    assert runs[0] == runs[1]
