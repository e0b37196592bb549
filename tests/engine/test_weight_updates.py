"""Weights that arrive have the bits, the digest and the place of weights that were loaded."""

import os
import random
import re
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run, small_config
from tests.lib.models.model_weights import weights_of
from tests.lib.some_slow import some_slow
from tests.lib.thread_world import run_threads
from tests.lib.weight_sender import LocalSender, info_of, tensors_of, update
from tpdet.comm.world.world import SoloWorld
from tpdet.control.weight_orders import CarrierInfo, TensorsInfo
from tpdet.engine import Engine
from tpdet.engine.interventions import Interventions
from tpdet.errors import ReloadError, WeightUpdateError

pytestmark = pytest.mark.long

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2}
_random = random.Random(11)
BASE = [_random.randrange(1024) for _ in range(300)]
WIDE = {"hidden": 512, "heads": 8, "head_dim": 64}


def asked(name):
    return [ask(name, BASE), ask(f"{name}-s", BASE[:30], **SAMPLED)]


def swap(sender, tensors, names=None):
    """A wave that updates the weights over a sender that every rank knows."""

    def wave(engine):
        sender.tensors = tensors
        engine.weights.start_update()
        engine.weights.update(info_of(tensors, names))
        engine.weights.finish_update()

    return wave


def engine_of(model, world=None, **settings):
    return Engine(small_config(model, **settings), world or SoloWorld())


def digest_of(model, **settings):
    return engine_of(model, **settings).weights.digest


def shuffled(tensors, seed=3):
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    return names


def assert_as_fresh(found, name, fresh):
    for mine, alone in ((name, "a"), (f"{name}-s", "a-s")):
        assert found.answer(mine) == fresh.answer(alone)
        keys = [key for key in found.logits if key[0] == mine]
        assert keys
        for key in keys:
            assert_same_bits(found.logits[key], fresh.logits[alone, *key[1:]], str(key))


CASES = [
    pytest.param("qwen3", 1, {"kv_heads": 2}, marks=pytest.mark.slow),
    ("qwen2", 2, {"kv_heads": 2, "tie": True}),
    pytest.param("qwen2", 4, {"kv_heads": 2, "tie": True}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 2, {"kv_heads": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3", 8, {**WIDE, "kv_heads": 8}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 8, {**WIDE, "kv_heads": 8}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", 4, {"kv_heads": 2}, marks=pytest.mark.slow),
    pytest.param("glm4_moe", 2, {"kv_heads": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3_next", 2, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "tp", "options"), CASES)
def test_answers_after_each_update_are_those_of_a_fresh_start(tiny_model, family, tp, options):
    models = [tiny_model(family, seed=seed, **options) for seed in (0, 1)]
    fresh = [run(model, asked("a")) for model in models]
    sender = LocalSender()
    waves = []
    for number, which in enumerate((1, 0)):
        tensors = tensors_of(models[which])
        waves += [swap(sender, tensors, shuffled(tensors, number)), asked(f"n{number}")]
    digests = []
    waves.append(lambda engine: digests.append(engine.weights.digest))
    found = run(models[0], asked("a"), waves=waves, tp=tp, change=sender.joined)
    assert found.hits == [0] * 3, "no page of other weights was read"
    for name, which in (("a", 0), ("n0", 1), ("n1", 0)):
        assert_as_fresh(found, name, fresh[which])
    assert fresh[0].answer("a") != fresh[1].answer("a")
    assert digests == [digest_of(models[0])]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {**WIDE, "kv_heads": 8}), ("qwen2", {"kv_heads": 2, "tie": True})],
)
def test_fifty_updates_in_a_row(tiny_model, family, options, tp):
    """Three models take turns, sent in another order each time: full rows of logits are equal."""
    models = [tiny_model(family, seed=seed, **options) for seed in (0, 1, 2)]
    few = {"max_tokens": 3}
    fresh = [run(model, [ask("a", BASE[:40], **few)]) for model in models]
    sender, waves = LocalSender(), []
    for number in range(50):
        tensors = tensors_of(models[(number + 1) % 3])
        waves += [swap(sender, tensors, shuffled(tensors, number))]
        waves += [[ask(f"n{number}", BASE[:40], **few)]]
    found = run(models[0], [ask("a", BASE[:40])], waves=waves, tp=tp, change=sender.joined)
    rows = 0
    for number in range(50):
        alone = fresh[(number + 1) % 3]
        assert found.answer(f"n{number}") == alone.answer("a")
        for key in (key for key in found.logits if key[0] == f"n{number}"):
            assert_same_bits(found.logits[key], alone.logits["a", *key[1:]], str(key))
            rows += 1
    assert rows == 150


@pytest.mark.parametrize(
    "family",
    some_slow(
        ("phi3", "mixtral", "qwen3_next"),
        ("qwen2", "phi3", "starcoder2", "olmo3", "mixtral", "gpt_oss", "glm4_moe", "qwen3_next"),
    ),
)
def test_every_weight_is_overwritten_where_it_lies(tiny_model, family):
    options = {"tie": family == "qwen2"} | ({} if family == "qwen3_next" else {"kv_heads": 2})
    old, new = (tiny_model(family, seed=seed, **options) for seed in (0, 1))
    engine, other = engine_of(old), engine_of(new)
    before = {name: t.data_ptr() for name, t in weights_of(engine.runner.model).items()}
    digest = update(engine, LocalSender(), tensors_of(new))
    found, expected = weights_of(engine.runner.model), weights_of(other.runner.model)
    assert {name: t.data_ptr() for name, t in found.items()} == before
    assert len(found) > 15 and found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_same_bits(tensor, expected[name], name)
    assert digest == other.runner.model_digest == engine.weights.digest
    assert engine.system_fingerprint == other.system_fingerprint
    assert (engine.weights.number, engine.weights.version, engine.weights.state) == (
        1,
        "1",
        "whole",
    )


def saved(model, folder, tensors):
    """A copy of a model's directory with other tensors."""
    copy = shutil.copytree(model, folder / "sent")
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("tp", some_slow((2,), (1, 2, 4, 8)))
def test_the_digest_is_that_of_a_directory_with_what_was_sent(tiny_model, tmp_path, tp):
    """Other dtypes than the model's, and the tied head or not: as files with them have it."""
    old, new = (
        tiny_model("qwen2", kv_heads=2, seed=seed, tie=True, dtype="bfloat16") for seed in (0, 1)
    )
    tensors = tensors_of(new)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors[
        "model.layers.0.mlp.up_proj.weight"
    ].half()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    copy = saved(new, tmp_path, tensors)

    def one_rank(world):
        engine, sender = engine_of(old, world), LocalSender(tensors)
        sender.joined(engine)
        if world.rank:
            return engine.worker_loop()
        digests = [update(engine, sender, tensors, shuffled(tensors))]
        del tensors["lm_head.weight"]
        digests.append(update(engine, sender, tensors))
        engine.stop_workers()
        return digests

    assert run_threads(tp, one_rank)[0] == [digest_of(copy)] * 2


def test_a_gpus_way_of_digesting_gives_the_same(tiny_model, monkeypatch):
    """Parts are digested several at a time where they lie; here the library does it."""
    import blake3

    def hash_parts(headers, parts):
        batches.append(len(parts))
        raws = [part.contiguous().reshape(-1).view(torch.uint8).numpy().data for part in parts]
        pairs = zip(headers, raws, strict=True)
        return [blake3.blake3(header).update(raw).digest() for header, raw in pairs]

    batches = []
    old, new = (tiny_model("mixtral", kv_heads=2, seed=seed) for seed in (0, 1))
    monkeypatch.setattr("tpdet.runner.start.loading.hash_on", lambda device: hash_parts)
    monkeypatch.setattr("tpdet.checkpoint.transfer.arriving.BATCH_BYTES", 300_000)
    engine, tensors = engine_of(old), tensors_of(new)
    digest = update(engine, LocalSender(), tensors, shuffled(tensors))
    assert digest == digest_of(new) and max(batches) > 1
    expected = weights_of(engine_of(new).runner.model)
    for name, tensor in weights_of(engine.runner.model).items():
        assert_same_bits(tensor, expected[name], name)
    for value in (torch.nan, -torch.inf):
        tensors["model.layers.0.self_attn.v_proj.weight"][1, 2] = value
        with pytest.raises(WeightUpdateError, match=r"v_proj.weight holds NaN or infinity"):
            update(engine, LocalSender(), tensors)


STACKED = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")


def stacked(tensors, block):
    """Experts as transformers' modules stack them: gates, then ups, of all experts of a layer."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        of_expert = f"model.layers.{layer}.{block}.experts.{{}}.{{}}.weight"
        gates, ups, downs = (
            torch.stack([tensors[of_expert.format(i, name)] for i in range(8)])
            for name in ("w1", "w3", "w2")
        )
        name = f"model.layers.{layer}.{block}.experts"
        found |= {f"{name}.gate_up_proj": torch.cat([gates, ups], 1), f"{name}.down_proj": downs}
    return {name.replace(f".{block}.", ".mlp."): tensor for name, tensor in found.items()}


def test_stacked_experts_of_a_renamed_block_have_their_places(tiny_model, tmp_path):
    old, new = (tiny_model("mixtral", kv_heads=2, seed=seed) for seed in (0, 1))
    tensors = stacked(tensors_of(new), "block_sparse_moe")
    assert "model.layers.1.mlp.gate.weight" in tensors
    engine = engine_of(old)
    digest = update(engine, LocalSender(), tensors, shuffled(tensors))
    assert digest == digest_of(saved(new, tmp_path, tensors)) == digest_of(new)
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    gates, ups = tensors[gate_up].chunk(2, 1)
    tensors[gate_up] = torch.cat([ups, gates], 1)
    assert update(engine, LocalSender(), tensors) != digest, "gates stand before ups"


@pytest.mark.slow
@pytest.mark.parametrize("family", (*STACKED, "phi3", "qwen2"))
def test_parameters_arrive_by_the_names_that_transformers_gives_them(tiny_model, tmp_path, family):
    from transformers import AutoModelForCausalLM  # seconds that few tests need

    old, new = (tiny_model(family, kv_heads=2, seed=seed, tie=family == "qwen2") for seed in (0, 1))
    module = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    buffers = (item for item in module.named_buffers() if "e_score_correction_bias" in item[0])
    tensors |= dict(buffers)
    assert ("lm_head.weight" in tensors) == (family != "qwen2")
    if family in STACKED:
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
    engine, other = engine_of(old), engine_of(new)
    digest = update(engine, LocalSender(), tensors, shuffled(tensors))
    assert digest == digest_of(saved(new, tmp_path, tensors)) == other.weights.digest
    found, expected = weights_of(engine.runner.model), weights_of(other.runner.model)
    for name, tensor in found.items():
        assert_same_bits(tensor, expected[name], name)


@pytest.fixture
def served(tiny_model):
    """An engine of one model, and another's tensors."""
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    return engine_of(old), tensors_of(new)


def info(**fields):
    return TensorsInfo(**{"names": [], "dtype_names": [], "shapes": []} | fields)


NORM = "model.norm.weight"
REFUSALS = {
    "unknown": (["model.norms.weight"], ["float32"], [[256]], "norms.weight has no place"),
    "shape": ([NORM], ["float32"], [[255]], r"shape \[255\], config.json asks for \[256\]"),
    "dtype": ([NORM], ["int8"], [[256]], "has dtype int8: send float32, bfloat16, float16"),
    "twice": ([NORM] * 2, ["float32"] * 2, [[256]] * 2, "is sent twice"),
    "extents": ([NORM], ["float32"], [[]], r"shape \[\]: 1 to 8 extents"),
    "lists": ([NORM], ["float32"], [], "1 names, 1 dtypes and 0 shapes"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_is_refused_before_a_byte_and_the_old_weights_serve_on(served, kind):
    engine, tensors = served
    sender = LocalSender(tensors)
    sender.joined(engine)
    names, dtypes, shapes, message = REFUSALS[kind]
    before = {name: t.clone() for name, t in weights_of(engine.runner.model).items()}
    engine.weights.start_update()
    refused = info(names=[*names, "lm_head.weight"], dtype_names=dtypes, shapes=shapes)
    if kind != "lists":
        whole = info_of(tensors, ["lm_head.weight"])
        refused = info(
            names=[*whole.names, *names],
            dtype_names=[*whole.dtype_names, *dtypes],
            shapes=[*whole.shapes, *shapes],
        )
        message = f"(?s).*{message}"
    else:
        refused = info(names=names, dtype_names=dtypes, shapes=shapes)
    with pytest.raises(WeightUpdateError, match=message) as error:
        engine.weights.update(refused)
    assert error.value.status == 400
    assert engine.weights.usable and engine.weights.state == "open"
    for name, tensor in weights_of(engine.runner.model).items():
        assert_same_bits(tensor, before[name], name)
    engine.weights.update(info_of(tensors))  # the same update goes on
    assert engine.weights.finish_update()


def test_calls_out_of_order_are_refused(served):
    engine, tensors = served
    weights = engine.weights
    for call in (lambda: weights.update(info_of(tensors)), weights.finish_update):
        with pytest.raises(WeightUpdateError, match="start one first") as error:
            call()
        assert error.value.status == 409
    weights.start_update()
    with pytest.raises(WeightUpdateError, match="open already") as error:
        weights.start_update()
    assert error.value.status == 409
    with pytest.raises(WeightUpdateError, match="init its group first"):
        weights.update(info_of(tensors))
    with pytest.raises(ReloadError, match="finish it first"):
        engine.reload("anything")
    with pytest.raises(
        WeightUpdateError, match=r"not complete, 2. tensors did not arrive: lm_head"
    ) as error:
        weights.finish_update()
    assert error.value.status == 409 and len(error.value.missing) == len(tensors)
    assert weights.state == "whole" and weights.number == 0, "nothing had arrived"


@pytest.mark.parametrize("heal", ["update", "reload"])
def test_an_incomplete_update_is_torn_until_a_complete_one(tiny_model, served, heal):
    engine, tensors = served
    weights, sender = engine.weights, LocalSender(tensors)
    sender.joined(engine)
    weights.start_update()
    names = sorted(tensors)
    weights.update(info_of(tensors, names[3:]))
    assert not weights.usable and weights.missing == tuple(names[:3])
    engine.submit(ask("early", BASE[:9]))
    with pytest.raises(WeightUpdateError, match="incomplete: no step"):
        engine.step()
    with pytest.raises(WeightUpdateError) as error:
        weights.finish_update("step-1")
    assert error.value.status == 409 and error.value.missing == tuple(names[:3])
    assert names[0] in str(error.value)
    assert weights.state == "torn" and weights.number == 0
    for end in (weights.close_carrier, weights.abandon_update, weights.finish_update):
        weights.start_update()
        assert weights.state == "open" and not weights.usable, "nothing has become whole by it"
        with suppress(WeightUpdateError):  # nothing arrived
            end()
        assert weights.state == "torn" and not weights.usable
        with pytest.raises(WeightUpdateError, match="incomplete: no step"):
            engine.step()
    if heal == "update":
        update(engine, sender, tensors, version="step-1")
    else:
        engine.reload(str(tiny_model("qwen3", kv_heads=2, seed=1)))
    assert weights.usable and weights.state == "whole" and weights.number == 1
    assert {output.weights for output in engine.step()} == {1}, "what waited goes on"
    assert weights.digest == digest_of(tiny_model("qwen3", kv_heads=2, seed=1))


@pytest.mark.parametrize("tp", some_slow((1,), (1, 2)))
def test_a_sender_that_dies_at_any_tensor_leaves_no_mixed_answer(tiny_model, tp):
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    tensors = tensors_of(new)
    fresh = run(new, asked("a"))
    sender, counts = LocalSender(tensors), []

    def dies_everywhere(engine):
        for count in range(len(tensors)):
            sender.dies_before = count
            engine.runner.weights.carrier = sender
            engine.weights.start_update()
            with pytest.raises(WeightUpdateError, match="the sender is gone") as error:
                engine.weights.update(info_of(tensors))
            counts.append(count)
            assert error.value.status == 502 and engine.weights.state == "torn"
            with pytest.raises(WeightUpdateError, match="no step is made"):
                engine.step()
            with pytest.raises(WeightUpdateError) as unfinished:
                engine.weights.finish_update()  # as TRL does, whatever happened
            assert len(unfinished.value.missing) == len(tensors) - count
            sender.dies_before = None

    def everywhere(engine):
        """Each rank meets the sender again before it is told anything."""
        obey = engine.runner.obey

        def meet_and_obey(order, tick):
            sender.joined(engine)
            return obey(order, tick)

        engine.runner.obey = meet_and_obey

    waves = [dies_everywhere, swap(sender, tensors), asked("n")]
    found = run(old, asked("a"), waves=waves, tp=tp, change=everywhere)
    assert counts == [*range(len(tensors))]
    assert_as_fresh(found, "n", fresh)


@pytest.mark.parametrize("tp", some_slow((1,), (1, 2)))
def test_a_directory_that_changes_while_it_is_read_tears_the_update(tiny_model, tmp_path, tp):
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    target = shutil.copytree(new, tmp_path / "target")
    changed = saved(new, tmp_path, tensors_of(new) | {NORM: tensors_of(new)[NORM] * 2})
    fresh = run(new, asked("a"))
    reads = []

    def change_after_the_check():
        reads.append(1)
        if len(reads) == len(tensors_of(new)):
            (changed / "model.safetensors").replace(target / "model.safetensors")

    def by_directory(engine):
        weights = engine.weights
        weights.start_update()
        with pytest.raises(WeightUpdateError, match=f"{NORM} changed while") as error:
            weights.update(TensorsInfo(weight_dir=str(target)), change_after_the_check)
        assert error.value.status == 409
        assert weights.state == "torn" and not weights.usable and NORM in weights.missing
        weights.start_update()
        weights.update(TensorsInfo(weight_dir=str(new)))
        assert weights.finish_update() == digest_of(new)

    found = run(old, asked("a"), waves=[by_directory, asked("n")], tp=tp)
    assert_as_fresh(found, "n", fresh)


@pytest.mark.parametrize("meanwhile", ["checked", "overwritten"])
def test_a_file_that_is_cut_in_place_is_refused_by_name(tiny_model, tmp_path, meanwhile):
    """Whoever maps a file dies when it is truncated: here the server lives and says what ended."""
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    target, ticks = shutil.copytree(new, tmp_path / "target"), []
    cut_at = 3 if meanwhile == "checked" else 3 + len(tensors_of(new))

    def cut():
        ticks.append(1)
        if len(ticks) == cut_at:
            os.truncate(target / "model.safetensors", 4096)

    weights = engine_of(old).weights
    weights.start_update()
    with pytest.raises(WeightUpdateError, match="cannot be read: the file ends at byte") as error:
        weights.update(TensorsInfo(weight_dir=str(target)), cut)
    if meanwhile == "checked":
        assert (error.value.status, weights.state, weights.usable) == (400, "open", True)
        weights.abandon_update()
    else:
        assert (error.value.status, weights.state, weights.usable) == (409, "torn", False)
    weights.start_update()
    weights.update(TensorsInfo(weight_dir=str(new)))
    assert weights.finish_update() == digest_of(new)


def test_no_tensor_comes_over_a_directory(tiny_model, served):
    """The digest of the update would be the directory's, whatever came later."""
    (engine, tensors), new = served, tiny_model("qwen3", kv_heads=2, seed=1)
    LocalSender({NORM: tensors[NORM] * 2}).joined(engine)
    engine.weights.start_update()
    engine.weights.update(TensorsInfo(weight_dir=str(new)))
    with pytest.raises(WeightUpdateError, match="was all of this update") as error:
        engine.weights.update(info_of(tensors, [NORM]))
    assert error.value.status == 409
    engine.weights.finish_update()
    expected = weights_of(engine_of(new).runner.model)
    for name, tensor in weights_of(engine.runner.model).items():
        assert_same_bits(tensor, expected[name], name)


def test_a_value_that_is_not_finite_tears_the_update(served):
    engine, tensors = served
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = torch.nan
    with pytest.raises(WeightUpdateError, match=r"down_proj.weight holds NaN") as error:
        update(engine, LocalSender(), tensors)
    assert error.value.status == 400 and engine.weights.state == "torn"


def test_a_tied_head_with_other_bits_tears_the_update(tiny_model):
    model = tiny_model("qwen2", kv_heads=2, tie=True)
    engine, tensors = engine_of(model), tensors_of(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][5, 5] += 1
    with pytest.raises(WeightUpdateError, match=r"is tied to .* but has other bits") as error:
        update(engine, LocalSender(), tensors)
    assert error.value.status == 400 and engine.weights.state == "torn"


def test_a_call_without_names_has_those_of_the_call_before(tiny_model, served):
    engine, tensors = served
    sender = LocalSender(tensors)
    sender.joined(engine)
    engine.weights.start_update()
    with pytest.raises(WeightUpdateError, match="none were named before") as error:
        engine.weights.update(info())
    assert error.value.status == 400
    first = update_again(engine, tensors)
    sender.tensors = {name: tensor * 2 for name, tensor in tensors.items()}
    engine.weights.start_update()
    engine.weights.update(info())
    second = engine.weights.finish_update()
    sender.tensors = tensors
    engine.weights.start_update()
    engine.weights.update(info())
    assert engine.weights.finish_update() == first != second


def update_again(engine, tensors):
    """The rest of an update that is open."""
    engine.weights.update(info_of(tensors))
    return engine.weights.finish_update()


def test_a_label_names_the_same_weights_for_ever(served):
    engine, tensors = served
    sender, other = LocalSender(), {name: tensor * 2 for name, tensor in tensors.items()}
    update(engine, sender, tensors, version="a")
    update(engine, sender, tensors, version="a")  # the same weights may have it again
    assert engine.weights.number == 2
    with pytest.raises(WeightUpdateError, match=r"version 'a' was the name of weights") as error:
        update(engine, sender, other, version="a")
    assert error.value.status == 409 and engine.weights.state == "torn"
    assert engine.weights.version == "a" and engine.weights.number == 2
    update(engine, sender, other)
    assert engine.weights.version == "3" and engine.weights.usable


def test_a_tensor_and_a_part_of_it_are_refused(tiny_model):
    model = tiny_model("phi3", kv_heads=2)
    engine, tensors = engine_of(model), tensors_of(model)
    fused = next(name for name in tensors if name.endswith("gate_up_proj.weight"))
    part = fused.replace("gate_up_proj", "up_proj")
    tensors[part] = tensors[fused][: len(tensors[fused]) // 2]
    with pytest.raises(WeightUpdateError, match=re.escape(f"{part} is a part of {fused}")):
        update(engine, LocalSender(), tensors)


def test_what_a_dead_trainer_left_open_is_given_up_by_the_call_that_is_named(served):
    engine, tensors = served
    weights = engine.weights
    LocalSender(tensors).joined(engine)
    weights.start_update()
    weights.update(info_of(tensors, [*tensors][:3]))
    for begin in (weights.start_update, lambda: weights.open_carrier(CarrierInfo())):
        with pytest.raises(WeightUpdateError, match="by /shutdown_weight_transfer_engine") as error:
            begin()
        assert error.value.status == 409 and not weights.usable
    weights.close_carrier()
    assert weights.state == "torn"
    assert update(engine, LocalSender(), tensors) and weights.usable


class Skipping(LocalSender):
    """Announces a tensor, and hands over another's bits."""

    def receive(self, tensors, info, take, tick):
        super().receive(tensors, info, lambda it: take(self.changed(it)), tick)

    def changed(self, tensors):
        name = "model.layers.1.input_layernorm.weight"
        return {name: self.tensors["model.norm.weight"]} if name in tensors else tensors


def test_a_skipped_tensor_is_seen_in_the_digest_and_in_the_bits(tiny_model):
    """Negative control of the comparisons above."""
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    tensors = tensors_of(new)
    name = "model.layers.1.input_layernorm.weight"
    tensors["model.norm.weight"] = tensors[name] * 1.5
    engine = engine_of(old)
    digest = update(engine, Skipping(), tensors)
    right = update(engine, LocalSender(), tensors)
    assert digest != right
    sender = Skipping()
    runs = []
    for each in (sender, LocalSender()):
        waves = [swap(each, tensors), asked("n")]
        runs.append(run(old, asked("a"), waves=waves, change=each.joined))
    wrong, sound = runs
    assert not same_bits(wrong.logits["n", 0, 299], sound.logits["n", 0, 299])


def test_a_stale_page_would_change_bits(tiny_model, monkeypatch):
    """Negative control: without the new identity, pages of the old weights would be read."""
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    fresh = run(new, asked("a"))
    monkeypatch.setattr(Interventions, "recompute", lambda self, other_weights: None)
    sender = LocalSender()
    waves = [swap(sender, tensors_of(new)), asked("n")]
    found = run(old, asked("a"), waves=waves, change=sender.joined)
    assert found.hits == [0, 256]
    assert not same_bits(found.logits["n", 0, 299], fresh.logits["a", 0, 299])


@pytest.mark.parametrize("tp", some_slow((1,), (1, 2)))
def test_running_requests_go_on_from_their_ids_under_the_new_weights(tiny_model, tp):
    """Kept requests: each later token is that of a fresh start asked with all ids so far."""
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    sender, tensors = LocalSender(tensors_of(new)), tensors_of(new)
    params = {"temperature": 0.9, "seed": 5, "max_tokens": 12}

    def each_step(engine, step):
        if step == 6:
            engine.interventions.freeze(True)
            assert engine.interventions.settle() == []
            update(engine, sender, tensors)
            engine.interventions.freeze(False)

    found = run(
        old, [ask("a", BASE[:280], **params)], tp=tp, change=sender.joined, each_step=each_step
    )
    weights = [output.weights for output in found.outputs["a"]]
    before = weights.count(0)
    assert weights == [0] * before + [1] * (12 - before) and 0 < before < 12
    so_far = BASE[:280] + found.tokens("a")[:before]
    greedy = run(
        new, [ask("b", so_far + found.tokens("a")[before:], prompt_logprobs=0, max_tokens=1)]
    )
    for position in range(len(so_far), len(so_far) + 12 - before):
        left = found.logits["a", 0, position - 1]
        assert_same_bits(left, greedy.logits["b", 0, position - 1], str(position))
