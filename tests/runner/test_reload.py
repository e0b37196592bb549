"""Weights are reloaded in place: answers are those of a fresh start, and nothing old is read."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.models.model_weights import weights_of
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import IntegrityError, ReloadError
from tpdet.runner import Runner
from tpdet.scheduler.page_manager import PageManager

pytestmark = pytest.mark.long

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2}
_random = random.Random(11)
BASE = [_random.randrange(1024) for _ in range(600)]


@pytest.fixture(scope="module")
def models(tiny_model):
    return [tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh(models):
    """Each model's answers by an engine that was started on it."""
    return [run(model, [ask("a", BASE), ask("s", BASE[:30], **SAMPLED)]) for model in models]


def swap(model):
    """A wave that reloads; new weights are refused while there is work."""
    return lambda engine: engine.reload(str(model))


def assert_as_fresh(found, alone, name, other):
    assert found.answer(name) == alone.answer(other)
    for key in (key for key in found.logits if key[0] == name):
        assert_same_bits(found.logits[key], alone.logits[other, *key[1:]], str(key))


@pytest.mark.parametrize(
    ("tp", "ahead"), [(1, False), (2, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_answers_after_a_reload_are_those_of_a_fresh_start_and_no_hot_page_is_read(
    models, fresh, tp, ahead
):
    old, new = models
    waves = [
        [ask("hot", BASE)], swap(new), [ask("n", BASE), ask("ns", BASE[:30], **SAMPLED)],
        [ask("again", BASE)], swap(old), [ask("o", BASE), ask("os", BASE[:30], **SAMPLED)],
    ]  # fmt: skip
    found = run(old, [ask("a", BASE)], waves=waves, tp=tp, ahead=ahead)
    assert found.hits == [0, 512, 0, 512, 0]
    for name, other, which in (
        ("hot", "a", 0),
        ("n", "a", 1),
        ("ns", "s", 1),
        ("again", "a", 1),
        ("o", "a", 0),
        ("os", "s", 0),
    ):
        assert_as_fresh(found, fresh[which], name, other)
    assert fresh[0].answer("a") != fresh[1].answer("a")


def forgetful(monkeypatch):
    """Neither empty the cache nor bump a version at a reload: the key alone is left."""

    def only_rename(self, identity, running=()):
        self.prefixes._identity = identity

    monkeypatch.setattr(PageManager, "reload", only_rename)


def test_the_weights_digest_in_the_key_alone_keeps_old_pages_from_new_answers(
    models, fresh, monkeypatch
):
    forgetful(monkeypatch)
    found = run(models[0], [ask("a", BASE)], waves=[swap(models[1]), [ask("n", BASE)]])
    assert found.hits == [0, 0]
    assert_as_fresh(found, fresh[1], "n", "a")


def test_without_the_digest_in_the_key_old_pages_would_answer(models, fresh, monkeypatch):
    """Negative control of the test above."""
    forgetful(monkeypatch)
    monkeypatch.setattr(Runner, "prefix_identity", lambda *given: b"any weights")
    found = run(models[0], [ask("a", BASE)], waves=[swap(models[1]), [ask("n", BASE)]])
    assert found.hits == [0, 512]
    assert not torch.equal(found.logits["n", 0, 599], fresh[1].logits["a", 0, 599])


@pytest.mark.parametrize(
    ("family", "row_layers"),
    [
        *(
            (name, "fold")
            for name in ("qwen2", "qwen3", "phi3", "gemma3_text", "starcoder2", "qwen3_moe")
        ),
        pytest.param("gpt_oss", "fold", marks=pytest.mark.slow),
        ("qwen3", "gather"),
    ],
)
def test_every_weight_is_overwritten_where_it_lies_and_every_page_has_a_new_version(
    tiny_model, family, row_layers
):
    settings = {"kv_pages": 4, "row_layers": row_layers}
    old, new = (tiny_model(family, kv_heads=2, seed=seed, tie=family == "qwen2") for seed in (0, 1))
    engine = Engine(EngineConfig.from_values(model=str(old), **settings), SoloWorld())
    other = Engine(EngineConfig.from_values(model=str(new), **settings), SoloWorld())
    before = {name: t.data_ptr() for name, t in weights_of(engine.runner.model).items()}
    expected = weights_of(other.runner.model)
    ticks = []
    engine.reload(str(new), lambda: ticks.append(1))
    found = weights_of(engine.runner.model)
    assert {name: t.data_ptr() for name, t in found.items()} == before
    assert len(found) > 15 and found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_same_bits(tensor, expected[name], name)
    assert engine.system_fingerprint == other.system_fingerprint
    assert engine.runner.model_digest == other.runner.model_digest
    table = engine.runner.table
    assert [table.version(page) for page in range(4)] == [1] * 4
    assert len(ticks) == 2 * len(engine.runner.loaded.loader.reads)


def copy_of(model, folder):
    return shutil.copytree(model, folder / "copy")


def other_shape(folder):
    return edit_config(folder, "intermediate_size", 512)


def edit_config(folder, field, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    return folder


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


def nan_for_the_last_rank(tensors):
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = torch.nan


def reshaped(tensors):
    tensors["model.norm.weight"] = torch.ones(255)


def other_tokenizer(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def without_weights(folder):
    (folder / "model.safetensors").unlink()
    return folder


REFUSALS = {
    "shape": (other_shape, 65, r"intermediate_size is 512, the model that serves has 384"),
    "epsilon": (lambda f: edit_config(f, "rms_norm_eps", 0.1), 65, r"eps is 0.1, .* has 1e-06"),
    "truncated": (truncated, 65, r"model.safetensors: .* is truncated or damaged"),
    "nan": (lambda f: edit_weights(f, nan_for_the_last_rank), 65, r"down_proj.weight holds NaN"),
    "tensor": (lambda f: edit_weights(f, reshaped), 65, r"shape \[255\], .* \[256\]"),
    "missing": (lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")), 65, "in none of"),
    "tokenizer": (other_tokenizer, 65, r"tokenizer_config.json is \w{16}, .* has \w{16}"),
    "no weights": (without_weights, 66, "holds neither"),
    "nowhere": (lambda f: f / "nowhere", 66, "not a directory"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tp"), [*((kind, 1) for kind in REFUSALS), ("nan", 2), ("truncated", 2)]
)
def test_a_checkpoint_that_does_not_fit_leaves_the_old_weights_serving(
    models, fresh, tmp_path, kind, tp
):
    change, exit_code, message = REFUSALS[kind]
    bad = change(copy_of(models[1], tmp_path))
    told = []

    def refused(engine):
        with pytest.raises(ReloadError, match=message) as found:
            engine.reload(str(bad))
        told.append((found.value.exit_code, str(found.value)))

    waves = [refused, [ask("hot", BASE)]]
    found = run(models[0], [ask("a", BASE)], waves=waves, tp=tp)
    assert told[0][0] == exit_code
    if kind == "nan" and tp == 2:
        assert told[0][1].startswith("rank 1 on node ")  # rank 0 read nothing wrong
    assert found.hits == [0, 512]
    assert_as_fresh(found, fresh[0], "hot", "a")


def test_drawn_weights_have_nothing_to_reload_from(models):
    settings = {"model": str(models[0]), "kv_pages": 4, "load_format": "dummy"}
    engine = Engine(EngineConfig.from_values(**settings), SoloWorld())
    with pytest.raises(ReloadError, match="load_format is 'dummy'"):
        engine.reload(str(models[1]))


def test_a_checkpoint_that_changes_while_it_is_read_stops_the_engine(models, tmp_path):
    target = copy_of(models[1], tmp_path)
    engine = Engine(EngineConfig.from_values(model=str(models[0]), kv_pages=4), SoloWorld())
    reads, seen = len(engine.runner.loaded.loader.reads), []

    def change_after_the_check():
        seen.append(1)
        if len(seen) == reads:
            changed = tmp_path / "changed"
            tensors = load_file(target / "model.safetensors")
            tensors["model.norm.weight"][7] += 1.0
            save_file(tensors, changed)
            changed.replace(target / "model.safetensors")

    with pytest.raises(IntegrityError, match=r"tensor model.norm.weight changed while"):
        engine.reload(str(target), change_after_the_check)


def test_ranks_that_find_other_weights_refuse_and_go_on(models, fresh, tmp_path):
    """Each rank has a checkpoint of its own under the one name, and they differ."""
    places = [tmp_path / f"rank{rank}" for rank in range(2)]
    for place, model in zip(places, models, strict=True):
        shutil.copytree(model, place)

    def rank(world):
        engine = Engine(EngineConfig.from_values(model=str(models[0]), kv_pages=4), world)
        if world.rank > 0:
            real = engine.runner.loaded.loader.open_source
            engine.runner.loaded.loader.open_source = lambda directory, *rest: real(
                places[1], *rest
            )
            engine.worker_loop()
            return None
        with pytest.raises(ReloadError, match=r"piece 0 of tensor .* rank 0 on node .*, rank 1 on"):
            engine.reload(str(places[0]))
        engine.submit(ask("s", BASE[:30], **SAMPLED))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        engine.stop_workers()
        return [o.token_id for o in outputs]

    assert run_threads(2, rank, timeout=60.0)[0] == fresh[0].tokens("s")


def test_a_reload_wants_a_drained_engine(models):
    engine = Engine(EngineConfig.from_values(model=str(models[0]), kv_pages=4), SoloWorld())
    engine.submit(ask("a", BASE[:9]))
    with pytest.raises(IntegrityError, match="drain first"):
        engine.reload(str(models[1]))


def test_rank_0s_two_tables_are_compared_when_idle(models):
    engine = Engine(EngineConfig.from_values(model=str(models[0]), kv_pages=4), SoloWorld())
    engine.heartbeat()
    engine.check_integrity()
    engine.runner.table._versions[2] += 1
    engine.heartbeat()  # one rank has nobody to compare with
    with pytest.raises(IntegrityError, match=r"page 2 is at version 0 .* at version 1"):
        engine.check_integrity()
