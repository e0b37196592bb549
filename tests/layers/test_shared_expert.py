"""A shared expert narrower than ranks are many, and the gate that lies with the router's weight."""

import pytest
from safetensors.torch import save_file

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.models.pooled_models import with_config
from tests.lib.some_slow import some_slow
from tests.lib.weight_sender import LocalSender, info_of, tensors_of, update
from tpdet.cli import main
from tpdet.errors import WeightUpdateError

pytestmark = pytest.mark.long

PROMPT = [*range(3, 900, 23)]
WIDTH = 16
"""Inputs of a narrow shared expert: one leaf's, so that one rank has them all."""
ROUTER, GATE = "mlp.gate.weight", "mlp.shared_expert_gate.weight"


def asked(name):
    return [ask(name, PROMPT, max_tokens=3, prompt_logprobs=1)]


def assert_as(found, name, alone):
    assert found.answer(name) == alone.answer("a")
    for key, logits in alone.logits.items():
        assert_same_bits(found.logits[name, *key[1:]], logits, str(key))


@pytest.fixture
def narrow(tiny_model, tmp_path):
    """A function: family, seed -> a model whose shared expert is narrow."""

    def make(family, seed=0):
        model = tiny_model(family, seed=seed, dtype="bfloat16")
        folder = tmp_path / f"{family}-{seed}"
        if family == "glm4_moe":  # its width is that of all experts
            narrowed = ".mlp.experts.", ".shared_experts."
            settings = {"moe_intermediate_size": WIDTH}
        else:
            narrowed = (".shared_expert.",)
            settings = {"shared_expert_intermediate_size": WIDTH}
        with_config(model, folder, **settings)
        tensors = tensors_of(model)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") and any(part in name for part in narrowed):
                kept = tensor[:, :WIDTH] if "down_proj" in name else tensor[:WIDTH]
                tensors[name] = kept.contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("tp", some_slow((4,), (2, 4, 8)))
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe_text"])
def test_ranks_without_inputs_of_it_give_the_bits_of_one_rank(narrow, family, tp):
    model = narrow(family)
    alone = run(model, asked("a"))
    for placement in ("lanes", "auto"):
        found = run(model, asked("n"), tp=tp, experts=placement)
        assert_as(found, "n", alone)
        assert found.fingerprint == alone.fingerprint


def test_ranks_without_inputs_of_it_take_packed_and_new_weights(narrow, tmp_path):
    old, new = (narrow("qwen3_5_moe_text", seed) for seed in (0, 1))
    sender, fresh = LocalSender(), run(new, asked("a"))

    def send(engine):
        update(engine, sender, tensors_of(new))

    found = run(old, asked("o"), waves=[send, asked("n")], tp=4, change=sender.joined)
    assert_as(found, "n", fresh)
    packed = tmp_path / "packed"
    assert main(["quantise", str(old), "--format", "fp8-block", "--output", str(packed)]) == 0
    alone = run(packed, asked("a"), weights="dense")
    assert_as(run(packed, asked("n"), tp=4, weights="packed"), "n", alone)


def named(tensors, suffix):
    return [name for name in tensors if name.endswith(suffix)]


@pytest.mark.parametrize("tp", some_slow((2,), (1, 2)))
def test_gates_and_routers_arrive_in_any_order_and_calls(tiny_model, tp):
    """They have one place: what came first is kept until the other is here."""
    old, new = (tiny_model("qwen3_5_moe_text", seed=seed) for seed in (0, 1))
    tensors, sender = tensors_of(new), LocalSender()
    routers, gates = named(tensors, ROUTER), named(tensors, GATE)
    rest = [name for name in tensors if name not in {*routers, *gates}]
    fresh = run(new, asked("a"))
    assert len(routers) == len(gates) == 2
    waves = []
    for number, calls in enumerate(
        (
            [gates, rest, routers],
            [routers, rest, gates],
            [rest, [routers[0], gates[1]], [gates[0], routers[1]]],
            [[name] for name in reversed(tensors)],
        )
    ):
        waves += [in_calls(sender, tensors_of(old), [[*tensors]])]
        waves += [in_calls(sender, tensors, calls), asked(f"n{number}")]
    found = run(old, asked("o"), waves=waves, tp=tp, change=sender.joined)
    assert found.answer("o") != fresh.answer("a")
    for number in range(4):
        assert_as(found, f"n{number}", fresh)


@pytest.mark.parametrize("alone", [ROUTER, GATE])
def test_one_of_the_two_is_no_whole_update(tiny_model, alone):
    old, new = (tiny_model("qwen3_5_moe_text", seed=seed) for seed in (0, 1))
    tensors, sender = tensors_of(new), LocalSender()
    all_but = [name for name in tensors if not name.endswith(alone)]

    def torn(engine):
        with pytest.raises(WeightUpdateError) as error:
            in_calls(sender, tensors, [all_but])(engine)
        assert sorted(error.value.missing) == sorted(named(tensors, alone))
        assert engine.weights.state == "torn" and not engine.weights.usable
        update(engine, sender, tensors)

    found = run(old, asked("o"), waves=[torn, asked("n")], change=sender.joined)
    assert_as(found, "n", run(new, asked("a")))


def in_calls(sender, tensors, calls):
    """A wave that updates the weights in calls of so many names each."""

    def wave(engine):
        sender.tensors = tensors
        engine.weights.start_update()
        for names in calls:
            engine.weights.update(info_of(tensors, names))
        engine.weights.finish_update()

    return wave
