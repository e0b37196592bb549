"""Weights that a thread reads while the start goes on: the same bits, and the same refusals."""

import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.bits import assert_same_bits
from tests.lib.models.model_weights import weights_of
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import CheckpointError, ResourceError
from tpdet.runner.start import load_model
from tpdet.runner.start.compile_ahead import CompilingAhead


class NothingToCompile(CompilingAhead):
    """As on a GPU, whose kernels are all there."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.enabled = True

    def compile(self, work, phase):
        pass

    def finish(self):
        pass


@pytest.fixture
def beside(monkeypatch):
    """Starts read weights beside what they do, as those on GPUs do."""

    def begin():
        monkeypatch.setattr(load_model, "CompilingAhead", NothingToCompile)

    return begin


def start(model, world, **settings):
    return Engine(EngineConfig.from_values(model=str(model), kv_pages=4, **settings), world).runner


def loading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loading")]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_read_in_a_thread_are_those_read_at_once(tiny_model, beside, family, size):
    model = tiny_model(family, kv_heads=2, tie=family == "qwen2")
    at_once = run_threads(size, lambda world: start(model, world))
    beside()
    in_a_thread = run_threads(size, lambda world: start(model, world))
    for found, expected in zip(in_a_thread, at_once, strict=True):
        assert found.model_digest == expected.model_digest
        assert found.loaded.loader.reads == expected.loaded.loader.reads
        weights, others = weights_of(found.model), weights_of(expected.model)
        assert weights.keys() == others.keys() and len(weights) > 15
        for name, tensor in weights.items():
            assert_same_bits(tensor, others[name], name)


def test_random_weights_are_the_same_too(tiny_model, beside):
    model = tiny_model("qwen3", kv_heads=2)
    at_once = start(model, SoloWorld(), load_format="dummy", seed=5)
    beside()
    in_a_thread = start(model, SoloWorld(), load_format="dummy", seed=5)
    others = weights_of(at_once.model)
    for name, tensor in weights_of(in_a_thread.model).items():
        assert_same_bits(tensor, others[name], name)


def test_a_rank_can_wait_for_its_own_weights(tiny_model, beside, monkeypatch):
    model, seen = tiny_model("qwen3", kv_heads=2), []
    at_once = weights_of(start(model, SoloWorld()).model)
    beside()
    begin = load_model.Loader.begin

    def begin_and_wait(self, *given):
        found = begin(self, *given)
        found.wait()
        seen.append({name: tensor.clone() for name, tensor in weights_of(found.decoder).items()})
        assert not found.digest
        return found

    monkeypatch.setattr(load_model.Loader, "begin", begin_and_wait)
    start(model, SoloWorld())
    for name, tensor in seen[0].items():
        assert_same_bits(tensor, at_once[name], name)


def test_a_value_that_is_not_finite_is_refused_as_ever(tiny_model, beside, tmp_path):
    folder = shutil.copytree(tiny_model("qwen3", kv_heads=2), tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors")
    beside()
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN"):
        start(folder, SoloWorld())
    assert not loading_threads()


def test_a_start_that_fails_meanwhile_ends_the_thread(tiny_model, beside, monkeypatch):
    second, go_on, read = threading.Event(), threading.Event(), []
    beside()

    def fail(*_):
        assert second.wait(60) and loading_threads()
        go_on.set()
        raise ResourceError("no memory for what comes next")

    real = load_model.Loader.open_source

    def slow(self, directory, device, tick=None):
        source = real(self, directory, device, tick)
        read_into = source.read_into

        def one_after_another(reads, targets):
            read.append(reads)
            if len(read) > 1:
                second.set()
                assert go_on.wait(60)
                time.sleep(0.1)
            read_into(reads, targets)

        source.read_into = one_after_another
        return source

    monkeypatch.setattr(load_model.Loader, "open_source", slow)
    monkeypatch.setattr(load_model, "open_sharing", fail)
    with pytest.raises(ResourceError, match="no memory"):
        start(tiny_model("qwen3", kv_heads=2), SoloWorld())
    assert not loading_threads() and 2 <= len(read) < 8
