"""Slots of states through an engine: what is resumed or computed again, choices, other weights."""

from itertools import pairwise

import msgspec
import pytest
import torch

from tests.lib.engine_harness import ask, draft_anew, run
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import IntegrityError

PROMPT = torch.randint(0, 1024, (280,), generator=torch.Generator().manual_seed(5)).tolist()
HOW = {"dtype": "bfloat16", "max_num_batched_tokens": 1000}


@pytest.fixture(scope="module")
def hybrid(tiny_model):
    return tiny_model("qwen3_5_text", layers=2, kv_heads=2)


@pytest.fixture(scope="module")
def long_answer(hybrid):
    """An answer that crosses two chunk ends, computed row by row."""
    return run(hybrid, [ask("a", PROMPT, max_tokens=120, logprobs=0)], look=False, **HOW).answer(
        "a"
    )


def test_a_resumed_answer_is_verified_in_runs_that_end_before_a_third_chunk(hybrid, long_answer):
    told = tuple(token for token, *_ in long_answer)
    lengths = []

    def look(engine, step):
        states = engine.scheduler.policy.page_manager.states
        assert states.counts.state_slots_used == len(engine.scheduler.policy.running)
        lengths.append(engine.scheduler.statistics().totals.draft_tokens)

    for wrong in (None, 60):
        drafts = told if wrong is None else (*told[:wrong], told[wrong] ^ 1, *told[wrong + 1 :])
        request = ask("a", PROMPT, drafts=(drafts,), max_tokens=120, logprobs=0)
        found = run(hybrid, [request], change=draft_anew, each_step=look, look=False, **HOW)
        assert found.answer("a") == long_answer
    runs = [after - before for before, after in pairwise(lengths)]
    assert 60 < max(runs) <= 124, "runs of known answers are long, and are cut"


def test_what_is_computed_again_and_each_choice_has_the_same_bits(hybrid):
    params = {"max_tokens": 24, "logprobs": 0, "temperature": 1.0, "seed": 7}
    requests = [ask("a", PROMPT, n=3, **params), ask("b", PROMPT[:77], **params)]
    alone = run(hybrid, requests, look=False, enable_prefix_caching=False, **HOW)

    def again(engine, step):
        if step % 6 == 5:
            engine.interventions.recompute()

    found = run(hybrid, requests, each_step=again, look=False, **HOW)
    for name, choice in (("a", 0), ("a", 1), ("a", 2), ("b", 0)):
        assert found.answer(name, choice) == alone.answer(name, choice)
    shared = run(hybrid, requests, look=False, **HOW)
    assert shared.hits == [2 * 256], "two choices begin at the first one's snapshot"
    assert [shared.answer("a", i) for i in range(3)] == [alone.answer("a", i) for i in range(3)]


def test_snapshots_of_other_weights_are_not_read(hybrid, tiny_model):
    other = tiny_model("qwen3_5_text", layers=2, kv_heads=2, seed=9)
    ask_again = [ask("b", PROMPT, logprobs=0)]
    expected = run(other, [ask("a", PROMPT, logprobs=0)], look=False, **HOW).answer("a")
    found = run(
        hybrid,
        [ask("a", PROMPT, logprobs=0)],
        waves=(lambda engine: engine.reload(str(other)), ask_again),
        look=False,
        **HOW,
    )
    assert found.hits[-1] == 0
    assert found.answer("b") == expected != found.answer("a")


@pytest.mark.parametrize("damage", ["an event", "the table"])
def test_a_rank_with_other_slots_is_named(hybrid, damage):
    def change(engine):
        if engine.world.rank != 1:
            return
        states = engine.runner.states
        if damage == "an event":
            apply = states.apply
            states.apply = lambda events: apply(events[1:])
        else:
            states._chunks[3] = 5

    match = "state table of rank 1" if damage == "an event" else "state slot 3 stands at chunk 0"
    with pytest.raises(IntegrityError, match=match):
        run(hybrid, [ask("a", PROMPT[:9])], tp=2, change=change, max_num_seqs=4, **HOW)


def test_an_engine_counts_slots_and_snapshots(hybrid):
    config = EngineConfig.from_values(model=str(hybrid), kv_pages=8, max_num_seqs=3, **HOW)
    engine = Engine(config, SoloWorld())
    engine.submit(ask("a", PROMPT, max_tokens=2))
    engine.step()
    during = engine.statistics().states
    while engine.has_work:
        engine.step()
    after = engine.statistics().states
    assert (during.state_slots, during.state_slots_used) == (3, 1)
    assert (after.state_slots_used, after.snapshots_used, after.snapshots_taken) == (0, 1, 1)
    assert after.snapshots == 12
    sizes = {name: size for name, size in engine.gauges.items() if name.endswith("state_bytes")}
    assert sizes.keys() == {"sequence_state_bytes", "snapshot_state_bytes"}
    assert sizes["sequence_state_bytes"] > sizes["snapshot_state_bytes"] > 0
    engine.check_integrity()
    assert msgspec.structs.asdict(after).keys() == msgspec.structs.asdict(during).keys()
