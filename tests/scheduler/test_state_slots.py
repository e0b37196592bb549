"""Linear-attention states under random loads: what a row reads is the ids before it.

A prompt leaves its snapshots behind as it is computed, and no step ends for them.
"""

import random

import pytest

from tests.lib.some_slow import some_slow
from tests.scheduler.simulated.answers import answer_alone, make_prompt
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tests.scheduler.test_prefix_simulation import LOADS, Faults, run_and_check


@pytest.mark.parametrize(
    ("seed", "snapshots", "ahead"),
    some_slow(
        [(1, 3, 0.7), (2, 3, 1.0), (3, 20, 0.0)],
        [
            (seed, snapshots, ahead)
            for seed in LOADS
            for snapshots in (0, 3, 20)
            for ahead in (0.0, 0.7, 1.0)
        ],
    ),
)
def test_under_random_load_states_are_those_of_the_ids_before_them(seed, snapshots, ahead):
    random_ = random.Random(seed)
    scheduler = make_scheduler(prefix_identity=b"m", num_snapshots=snapshots, **LOADS[seed])
    sim = Faults(scheduler, random_, 0.05)
    run_and_check(sim, random_, 100, 700, ahead)
    states = scheduler.policy.page_manager.states
    assert states is not None
    counts = states.counts
    assert (counts.snapshots_read > 30) is (counts.snapshots_taken > 30) is (snapshots > 0)
    assert (scheduler.statistics().totals.prefix_hit_tokens > 10_000) is (snapshots > 0)
    assert counts.state_slots_used == counts.snapshots_used == 0


def test_a_prompt_is_one_step_whatever_snapshots_it_leaves_behind():
    """At the last page end, and where it leaves another prompt, which had no snapshot there."""
    limits = {"max_num_batched_tokens": 3000, "num_pages": 40, "prefix_identity": b"m"}
    scheduler = make_scheduler(num_snapshots=9, **limits)
    sim, ids = Simulation(scheduler), [i * i % 50 for i in range(2300)]
    prompts = [ids[:2300], ids[:600] + ids[1:900], ids[:600] + ids[7:900], ids[:1200]]
    kept, hits = [], []
    for number, prompt in enumerate(prompts):
        request = make_prompt(f"r{number}", prompt, max_tokens=1)
        before = scheduler.statistics().totals.prefix_hit_tokens
        first = len(sim.plans)
        sim.add(request)
        sim.run(limit=9)
        rows = [row for plan in sim.plans[first:] for row in plan.rows]
        assert len(rows) == 1, "a step for each prompt"
        kept.append([chunk * 64 for chunk, _ in rows[0].snapshots])
        hits.append(scheduler.statistics().totals.prefix_hit_tokens - before)
        assert sim.answers[f"r{number}", 0] == answer_alone(request, 0)
    assert kept == [[2048], [512, 1280], [1280], [1024]]
    assert hits == [0, 0, 512, 512]
    sim.check_idle()
