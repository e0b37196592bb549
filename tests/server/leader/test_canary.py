"""The canary: it runs only while nobody else does, and a changed answer closes the server."""

import shutil
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.server.fake_engine import FakeEngine
from tests.lib.server.harness import Server, eventually
from tpdet.errors import CheckpointError
from tpdet.requests.request import Request, SamplingParams
from tpdet.serve import state
from tpdet.server.leader import canary as canary_module
from tpdet.server.leader.bridge import Bridge
from tpdet.server.leader.canary import Canary, canary_request


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(canary_module.time, "monotonic", lambda: now.seconds)
    return now


def engine(**fields) -> FakeEngine:
    numbers = {"vocab_size": 512, "eos": 258, "max_model_len": 256, "max_queue": 1, "seats": 1}
    return FakeEngine(**numbers | fields)


@pytest.fixture
def learned(clock):
    """An engine and its canary of 10 s, which knows the answer."""
    source = engine()
    canary = Canary(source, 10.0)
    canary.learn()
    return source, canary


def run(canary: Canary, source: FakeEngine) -> list:
    others = []
    while source.has_work:
        others += canary.take(source.step())
    return others


def test_it_runs_when_due_and_idle_and_stays_healthy(clock, learned):
    source, canary = learned
    assert source.canaries == 1 and not source.has_work
    canary.begin_if_due()
    assert not source.has_work
    for count in (2, 3):
        clock.seconds += 10.0
        canary.begin_if_due()
        assert source.has_work and run(canary, source) == []
        assert source.canaries == count and canary.healthy


def test_an_answer_that_takes_long_comes_again_later(clock, learned):
    source, canary = learned
    clock.seconds += 10.0
    canary.begin_if_due()
    clock.seconds += 0.5
    run(canary, source)
    for seconds, count in ((10.0, 2), (39.0, 2), (0.6, 3)):
        clock.seconds += seconds
        canary.begin_if_due()
        run(canary, source)
        assert source.canaries == count, "half a second is 1 % of 50"


def test_nobody_sees_it_as_a_request(clock, learned):
    source, canary = learned
    clock.seconds += 10.0
    canary.begin_if_due()
    link = SimpleNamespace(socket=SimpleNamespace(sent=[]))
    link.socket.send = link.socket.sent.append
    for unasked, expected in ((canary.running, 0), (False, 1)):  # negative control: the engine's
        Bridge([link], 60.0).report(source, unasked=unasked)
        status = link.socket.sent[-1]
        assert status.running + status.waiting == expected
    run(canary, source)
    assert not canary.running


def test_the_log_says_that_it_is_computed_before_the_first_step(clock, monkeypatch, caplog):
    source = engine()
    step, said = source.step, []
    monkeypatch.setattr(source, "step", lambda: said.append([*caplog.messages]) or step())
    with caplog.at_level("INFO", "tpdet.server"):
        Canary(source, 10.0).learn()
    assert said[0] == ["computing the canary's answer"]


def test_it_waits_while_a_client_is_served_and_makes_way_for_one(clock, learned):
    source, canary = learned
    clock.seconds += 60.0
    client = Request(
        request_id="cmpl-1", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4, seed=1)
    )
    source.submit(client)
    canary.begin_if_due()
    assert source.canaries == 1
    assert [o.request_id for o in run(canary, source)] == ["cmpl-1"] * 4
    canary.begin_if_due()
    assert source.canaries == 2
    assert canary.take(source.step()) == []
    second = msgspec.structs.replace(client, request_id="cmpl-2")
    source.submit(second)  # one seat: the canary holds it
    canary.abandon()
    assert [o.request_id for o in canary.take(source.step())] == ["cmpl-2"]
    run(canary, source)
    canary.begin_if_due()
    assert source.canaries == 2 and canary.healthy  # again only after another interval
    clock.seconds += 10.0
    canary.begin_if_due()
    run(canary, source)
    assert source.canaries == 3 and canary.healthy


def test_a_changed_answer_is_never_forgotten(clock, caplog):
    source = engine()
    source.drift_after = 2
    canary = Canary(source, 10.0)
    canary.learn()
    for mismatches in (0, 1, 2):
        clock.seconds += 10.0
        canary.begin_if_due()
        run(canary, source)
        assert canary.mismatches == mismatches
    source.drift_after = 0
    clock.seconds += 10.0
    canary.begin_if_due()
    run(canary, source)
    assert canary.mismatches == 2 and not canary.healthy
    assert "at start it was" in caplog.text


def test_an_interval_of_0_is_never(clock):
    source = engine()
    canary = Canary(source, 0.0)
    canary.learn()
    clock.seconds += 1e6
    canary.begin_if_due()
    assert source.canaries == 0 and canary.healthy


@pytest.mark.parametrize("context", [1, 2, 8, 9, 40, 41, 4096])
def test_the_request_fits_any_model(context):
    found = canary_request("canary-1", 300, context)
    assert 1 <= len(found.prompt_token_ids) <= 32
    assert len(found.prompt_token_ids) + found.params.max_tokens <= context
    assert max(found.prompt_token_ids) < 256


def test_a_server_whose_bits_change_is_not_ready_and_refuses(tmp_path):
    server = Server(tmp_path, "--canary-interval", "0.3", drift_after=2)
    try:
        eventually(lambda: server.http.get("/ready").status_code == 503)
        assert server.metric("tpdet_canary_mismatch_total") >= 1
        assert server.http.get("/health").status_code == 200
        found = server.complete()
        assert found.status_code == 503 and found.headers["retry-after"]
        assert found.json()["error"]["code"] == "engine_dead"
        assert "canary" in server.log.read_text()
    finally:
        assert server.stop() == 0


def test_a_sound_server_stays_ready_and_its_answers_stay_the_same(tmp_path):
    server = Server(tmp_path, "--canary-interval", "0.05")
    try:
        first = server.canary()
        for _ in range(20):
            assert server.canary() == first
        assert server.metric("tpdet_canary_mismatch_total") == 0
        assert server.http.get("/ready").status_code == 200
    finally:
        assert server.stop() == 0


class Hits:
    """A real engine, and how much of the canary's prompt it read from its prefix cache."""

    def __init__(self, model):
        from tpdet.comm.world.world import SoloWorld
        from tpdet.config import EngineConfig
        from tpdet.engine import Engine

        config = EngineConfig.from_values(model=str(model), kv_pages=16)
        self.engine = Engine(config, SoloWorld())

    def of_second_run(self) -> int:
        canary = Canary(self.engine, 1e-6)
        canary.learn()
        canary.begin_if_due()
        while self.engine.has_work:
            canary.take(self.engine.step())
        assert canary.healthy
        return self.engine.statistics().totals.prefix_hit_tokens


def test_a_long_canary_is_computed_each_time_and_not_read_from_the_cache(tiny_model, monkeypatch):
    monkeypatch.setattr(canary_module, "PROMPT_TOKENS", 300)
    monkeypatch.setattr(canary_module, "MOST_SHARE", 1e9)  # at once again
    model = tiny_model("qwen3", kv_heads=2)
    assert Hits(model).of_second_run() == 0
    real = canary_module.canary_request

    def unsalted(*args):
        return msgspec.structs.replace(real(*args), cache_salt="")

    monkeypatch.setattr(canary_module, "canary_request", unsalted)
    assert Hits(model).of_second_run() == 256  # negative control: without a salt of its own


def test_weights_that_overflow_are_refused_and_after_a_reload_good_ones_serve_again(
    tiny_model, tmp_path
):
    from tpdet.comm.world.world import SoloWorld
    from tpdet.config import EngineConfig
    from tpdet.engine import Engine

    good = tiny_model("qwen3", kv_heads=2)
    bad = shutil.copytree(good, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: torch.full_like(tensors[name], 3e38)}, bad / "model.safetensors")

    start = Engine(EngineConfig.from_values(model=str(bad), kv_pages=16), SoloWorld())
    with pytest.raises(CheckpointError, match="NaN or infinity for a short prompt"):
        start.runner.check_poison()
    with pytest.raises(CheckpointError, match="canary failed with numerical_error"):
        Canary(start, 10.0).learn()

    for interval in (0.0, 10.0):
        engine = Engine(EngineConfig.from_values(model=str(good), kv_pages=16), SoloWorld())
        canary = Canary(engine, interval)
        canary.learn()
        engine.reload(str(bad))
        with pytest.raises(CheckpointError, match="the canary failed"):
            canary.renew()
        quiet = SimpleNamespace(begun=False, sound=True, refuses=False)
        asked = SimpleNamespace(begun=True)
        assert canary.failed and not canary.healthy
        assert state(quiet, canary, quiet, quiet, quiet) == "unusable"
        assert state(quiet, canary, quiet, asked, quiet) == "reloading"  # the way out
        engine.reload(str(good))
        canary.renew()
        assert canary.healthy and state(quiet, canary, quiet, quiet, quiet) == "accepting"
