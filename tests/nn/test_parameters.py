"""Parameters have the names and shapes of transformers' own."""

import pytest
import torch

import tpdet.nn
from tests.conftest import DATA_FAMILIES, FAMILIES

OTHERS = [name for name in (*FAMILIES, *DATA_FAMILIES, "olmo2") if name not in ("llama", "qwen3")]


def shapes(tensors):
    return {name: tuple(values.shape) for name, values in tensors.items()}


@pytest.mark.parametrize(
    ("family", "tie"),
    [
        ("llama", True),
        ("qwen3", False),
        *[pytest.param(name, None, marks=pytest.mark.slow) for name in OTHERS[:-1]],
        ("qwen3_moe", True),
    ],
)
def test_names_and_shapes_are_those_of_transformers(tiny_model, family, tie):
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds that few tests need

    model = tiny_model(family, tie=tie)
    loaded = tpdet.nn.load(model, device="cpu")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    assert shapes(loaded.state_dict()) == shapes(theirs.state_dict())
    assert shapes(dict(loaded.named_parameters())) == shapes(dict(theirs.named_parameters()))


def test_a_state_dict_of_transformers_is_loaded(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("qwen3_moe")
    loaded = tpdet.nn.load(model, device="cpu")
    before = {name: values.clone() for name, values in loaded.state_dict().items()}
    for values in loaded.state_dict().values():
        values.zero_()
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.load_state_dict(theirs.state_dict())
    assert all(torch.equal(loaded.state_dict()[name], values) for name, values in before.items())
