"""What the engine refuses: requests, settings, and steps on tables that differ."""

import pytest

from tests.lib.engine_harness import ask, run
from tests.lib.thread_world import run_threads
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import IntegrityError, OverloadedError, RequestError, UsageError


def test_a_table_that_was_changed_behind_the_plans_back_stops_the_step(tiny_model):
    config = EngineConfig.from_values(model=str(tiny_model("qwen3", kv_heads=2)), kv_pages=8)

    def rank(world):
        engine = Engine(config, world)
        if world.rank > 0:
            engine.runner.table._versions[3] += 1
            engine.worker_loop()
        else:
            engine.heartbeat()

    with pytest.raises(
        IntegrityError, match=r"step \d+: .* rank 0 on node node0 .* rank 1 .* differ: page 3"
    ):
        run_threads(2, rank, timeout=60.0)


def test_a_lost_page_event_stops_the_step(tiny_model):
    config = EngineConfig.from_values(model=str(tiny_model("qwen3", kv_heads=2)), kv_pages=8)

    def rank(world):
        engine = Engine(config, world)
        if world.rank > 0:
            real = engine.runner.table.apply
            engine.runner.table.apply = lambda events: real(events[:-1])
            engine.worker_loop()
        else:
            engine.submit(ask("a", range(5)))
            engine.step()

    with pytest.raises(IntegrityError, match="page table of rank 1 on node node0 has digest"):
        run_threads(2, rank, timeout=60.0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: ask("a", []), "prompt is empty"),
        (lambda: ask("a", [1100]), r"token id 1100 in prompt is outside the vocabulary \[0, 1100"),
        (lambda: ask("a", [-1]), "token id -1"),
        (lambda: ask("a", range(250), max_tokens=10), "over the model's context of 256"),
        (lambda: ask("a", [1], stop_token_ids=(5000,)), "token id 5000 in stop_token_ids"),
        (lambda: ask("a", [1], logit_bias={4000: 1.0}), "token id 4000 in logit_bias"),
        (lambda: ask("a", [1], n=0), r"n 0 is out of range \[1, 128\]"),
        (lambda: ask("a", [1], temperature=-1), "temperature -1 is out of range"),
        (lambda: ask("a", [1], temperature=float("nan")), "temperature nan"),
        (lambda: ask("a", [1], logprobs=101), r"logprobs 101 is out of range \[0, 100\]"),
        (lambda: ask("a", [1], temperature=1.0, top_p=0.0), "top_p 0"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_queued(tiny_model, request_, message):
    def change(engine):
        with pytest.raises(RequestError, match=message):
            engine.submit(request_())
        assert not engine.has_work

    run(tiny_model("qwen3", kv_heads=2), [], change=change, max_model_len=256)


def test_a_full_queue_refuses(tiny_model):
    def change(engine):
        for index in range(2):
            engine.submit(ask(f"q{index}", [1]))
        with pytest.raises(OverloadedError, match="2 requests wait"):
            engine.submit(ask("q2", [1]))
        for index in range(2):
            engine.abort(f"q{index}")

    run(tiny_model("qwen3", kv_heads=2), [], change=change, max_queue=2)


@pytest.mark.parametrize(
    ("settings", "tp", "message"),
    [
        ({"max_model_len": 5000}, 1, "max_model_len 5000 is over the model's context of 4096"),
        ({}, 3, "size 3 does not fit .* use one of 1, 2, 4, 8"),
        ({"leaves": 4}, 8, "4 leaves: use one of 1, 2, 4"),
        ({"leaves": 6}, 1, "leaves 6 is not a power of two"),
        ({"device": "cuda"}, 1, "device cuda: torch .* use --device cpu"),
        ({"transport": "mpi"}, 2, "transport mpi needs ranks that talk by MPI: start .* mpirun"),
        ({"max_num_seqs": 0}, 1, "max_num_seqs"),
        ({"surprise": 1}, 1, "unknown setting 'surprise'"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tiny_model, settings, tp, message):
    with pytest.raises(UsageError, match=message):
        run(tiny_model("qwen3", kv_heads=2), [], tp=tp, **settings)
