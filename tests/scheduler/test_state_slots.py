"""Linear-attention states under random loads: what a row reads is the ids before it."""

import random

import pytest

from tests.lib.scheduler.simulation import make_scheduler
from tests.lib.some_slow import some_slow
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
