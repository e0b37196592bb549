"""Gradients of whole models: beside transformers' in float64, and over ranks."""

import pytest
import torch

import tpdet.nn
from tests.lib.bits import assert_same_bits
from tests.lib.thread_world import run_threads

SHAPE = {"hidden": 128, "layers": 2, "intermediate": 256, "dtype": "float32"}
LENGTHS = [21, 1, 12]
IDS = torch.arange(sum(LENGTHS)) * 37 % 1100
OTHERS = ("llama", "qwen3", "gemma2", "gemma3_text", "starcoder2", "glm4_moe", "phi3", "olmo2",
          "granite", "mixtral")  # fmt: skip
UPSTREAM = torch.randn(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(4))


def gradients(model):
    """Gradients of all parameters by name, fp64."""
    (model.log_prob(IDS, LENGTHS, 0.8) * UPSTREAM).sum().backward()
    return {name: values.grad.double() for name, values in model.named_parameters()}


def transformers_gradients(directory):
    from transformers import AutoModelForCausalLM  # seconds that few tests need

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    scores = []
    for ids in IDS.split(LENGTHS):
        logits = model(ids[None]).logits[0, :-1] / 0.8
        scores.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    (torch.cat(scores) * UPSTREAM).sum().backward()
    return {name: values.grad for name, values in model.named_parameters()}


def worst(ours, theirs):
    """The largest error of a gradient, over the largest value of that gradient."""
    assert ours.keys() == theirs.keys()
    errors = ((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max() for n in ours)
    return max(map(float, errors))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *[pytest.param(name, marks=pytest.mark.slow) for name in OTHERS],
    ],
)
def test_gradients_are_those_of_transformers(tiny_model, family):
    model = tiny_model(family, **SHAPE)
    error = worst(gradients(tpdet.nn.load(model, device="cpu")), transformers_gradients(model))
    assert error < 2e-4


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_over_ranks_are_equal_on_all_and_near_those_of_one(tiny_model, family):
    model = tiny_model(family, **SHAPE)
    alone = gradients(tpdet.nn.load(model, device="cpu"))
    first, second = run_threads(2, lambda w: gradients(tpdet.nn.load(model, w, device="cpu")))
    for name, values in first.items():
        assert_same_bits(values, second[name])
    assert worst(first, alone) < 2e-5
