"""What a start refuses: ranks whose models differ, and operations that read what nobody wrote."""

import json
import shutil
import time

import pytest
import torch

from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import DisagreementError, TpdetError
from tpdet.kernels import ops
from tpdet.runner import runner
from tpdet.runner.start import loading
from tpdet.runner.start.poison_check import Workspaces


def engine_of(model, world, **settings):
    return Engine(EngineConfig.from_values(model=str(model), **{"kv_pages": 4} | settings), world)


def test_ranks_whose_configurations_differ_refuse_by_field_and_values(tiny_model, tmp_path):
    model = tiny_model("qwen3", kv_heads=2)
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    places = [model, other]
    message = (
        "model.rms_norm_eps: rank 0 on node node0 has '1e-06', rank 1 on node node0 has '1e-05'"
    )
    with pytest.raises(DisagreementError, match=message):
        run_threads(2, lambda world: engine_of(places[world.rank], world), timeout=60.0)


def test_ranks_whose_models_differ_after_loading_refuse(tiny_model, monkeypatch):
    """The digest that pages and answers carry is every rank's, not just rank 0's."""
    model, real = tiny_model("qwen3", kv_heads=2), loading.model_digest

    def rank(world):
        if world.rank == 1:
            monkeypatch.setattr(
                loading.Loader,
                "_digest",
                lambda self, weights: real(self._model, f"{weights.whole}{self._world.rank}"),
            )
        world.barrier()
        return engine_of(model, world)

    with pytest.raises(DisagreementError, match=r"model digest: rank 0 on node \w+ has '\w{64}'"):
        run_threads(2, rank, timeout=60.0)


@pytest.mark.parametrize("settings", [{}, {"kv_pages": 1, "max_model_len": 1}, {"kv_pages": 2}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_poison_changes_nothing(tiny_model, settings, dtype):
    engine = engine_of(tiny_model("qwen3", kv_heads=2), SoloWorld(), dtype=dtype, **settings)
    engine.runner.check_poison()
    assert engine.runner.pages.layers[0].keys[0].isnan().any()


@pytest.mark.alone
def test_poison_changes_nothing_at_two_ranks_and_is_quick(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)

    def rank(world):
        engine = engine_of(model, world)
        began = time.monotonic()
        engine.runner.check_poison()
        return time.monotonic() - began

    assert max(run_threads(2, rank, timeout=60.0)) < 2.0


def test_workspaces_are_filled_in_this_thread_only_while_it_lasts():
    with Workspaces(float("nan")) as mode:
        made = [torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(4).new_empty(2)]
        whole = torch.empty(3, dtype=torch.int64)
    assert all(tensor.isnan().all() for tensor in made) and mode.filled == 3
    assert whole.dtype == torch.int64


def leaks(kind):
    """Operations that read what they should not; by what they read."""
    real_norm, real_attention = ops.rms_norm, ops.paged_attention

    def norm(x, by):
        return real_norm(x, by) + 0.0 * torch.empty(x.shape[1], dtype=x.dtype)

    def free_page(q, keys, values, *rest):
        return real_attention(q, keys, values, *rest) + 0.0 * keys[0, 0, 0, 0]

    def unwritten(q, keys, values, batch, *rest):
        page = batch.sequences[0].pages[0]
        return real_attention(q, keys, values, batch, *rest) + 0.0 * values[page, 0, -1, 0]

    return {
        "workspace": ("rms_norm", norm),
        "free page": ("paged_attention", free_page),
        "unwritten part": ("paged_attention", unwritten),
    }[kind]


@pytest.mark.parametrize("kind", ["workspace", "free page", "unwritten part"])
def test_an_operation_that_reads_what_nobody_wrote_is_refused(tiny_model, monkeypatch, kind):
    """Negative controls: masked by a multiplication, NaN comes through."""
    engine = engine_of(tiny_model("qwen3", kv_heads=2), SoloWorld())
    monkeypatch.setattr(ops, *leaks(kind))
    with pytest.raises(TpdetError, match=r"poison check: .* logits of rank 0"):
        engine.runner.check_poison()


def test_one_bad_rank_is_refused_by_all(tiny_model, monkeypatch):
    told = []

    def rank(world):
        engine = engine_of(tiny_model("qwen3", kv_heads=2), world)
        if world.rank == 1:
            model, real = engine.runner.model, engine.runner.model.local_logits
            model.local_logits = lambda x: real(x) + 0.0 * torch.empty(1)
        with pytest.raises(TpdetError, match="rank 1") as found:
            engine.runner.check_poison()
        told.append(str(found.value))

    run_threads(2, rank, timeout=60.0)
    assert len(told) == 2


def test_a_server_checks_at_its_start(tiny_model, monkeypatch):
    from tpdet import serve
    from tpdet.launch.ranks.environment import RankEnvironment
    from tpdet.server.settings.settings import load_settings

    called = []
    monkeypatch.setattr(runner, "poison_check", lambda *args: called.append(1))
    model = str(tiny_model("qwen3", kv_heads=2))
    settings = load_settings(["--model", model, "--kv-pages", "4"], "test")
    serve.build_engine(settings, RankEnvironment()).close()
    assert called
