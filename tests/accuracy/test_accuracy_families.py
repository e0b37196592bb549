"""Families whose parts are data: logits as transformers', and the same bits at every size."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import DATA_FAMILIES
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tpdet.errors import CheckpointError

LENGTH = 90
IDS = torch.randint(0, 1024, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
FACTORS = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(24)],
    "long_factor": [2.0 + 0.5 * i for i in range(24)],
}


def ours(model, **settings):
    """Logits [T, V] of every position of a prompt."""
    found = run(model, [ask("a", IDS, max_tokens=1, prompt_logprobs=0)], **settings)
    return torch.stack([found.logits["a", 0, position] for position in range(LENGTH)])


def theirs(model, dtype):
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.no_grad():
        return network(torch.tensor([IDS])).logits[0].double()


def changed(model, folder, **settings):
    """The same weights under another `config.json`."""
    copy = shutil.copytree(model, folder)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return copy


def relative_error(found, expected):
    """The largest difference, in units of the largest logit."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", DATA_FAMILIES)
def test_a_family_has_the_logits_of_transformers_at_two_sizes(tiny_model, family):
    model = tiny_model(family)
    exact, alone = theirs(model, torch.float32), ours(model)
    assert relative_error(alone, exact) <= 1e-5
    assert_same_bits(ours(model, tp=2), alone)
    narrow, other = ours(model, dtype="bfloat16").double(), theirs(model, torch.bfloat16)
    if family == "gpt_oss":  # a near tie of experts, chosen otherwise in bf16, outweighs all rows
        assert (narrow - exact).norm(dim=1).median() <= (other - exact).norm(dim=1).median()
    else:
        assert (narrow - exact).norm() <= (other - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", DATA_FAMILIES)
def test_a_family_is_equal_at_four_and_eight_ranks(tiny_model, family):
    model = tiny_model(family)
    for dtype in ("float32", "bfloat16"):
        alone = ours(model, dtype=dtype)
        for tp in (4, 8):
            assert_same_bits(ours(model, tp=tp, dtype=dtype), alone)


def test_longrope_has_its_short_factors_and_ends_at_the_original_context(tiny_model, tmp_path):
    plain = tiny_model("phi3", heads=4)
    model = changed(
        plain,
        tmp_path / "longrope",
        rope_scaling=FACTORS,
        original_max_position_embeddings=1024,
    )
    assert relative_error(ours(model), theirs(model, torch.float32)) <= 1e-5
    assert relative_error(ours(plain), theirs(model, torch.float32)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "key", "neutral"),
    [
        ("granite", "embedding_multiplier", 1.0), ("granite", "residual_multiplier", 1.0),
        ("granite", "attention_multiplier", 0.125), ("granite", "logits_scaling", 1.0),
        ("smollm3", "no_rope_layers", [1, 1]), ("phi3", "partial_rotary_factor", 1.0),
        ("glm4", "partial_rotary_factor", 1.0), ("olmo3", "sliding_window", 4096),
        ("gemma3_text", "query_pre_attn_scalar", 64), ("gemma3_text", "sliding_window", 4096),
        ("gemma3_text", "rope_local_base_freq", 1e6), ("gemma2", "sliding_window", 4096),
        ("starcoder2", "norm_epsilon", 0.3),
        ("gemma2", "attn_logit_softcapping", None), ("gemma2", "final_logit_softcapping", None),
        ("gpt_oss", "sliding_window", 4096), ("gpt_oss", "num_experts_per_tok", 3),
        ("gpt_oss", "rope_scaling", {"rope_type": "default"}),
        ("glm4_moe", "routed_scaling_factor", 1.0), ("glm4_moe", "partial_rotary_factor", 1.0),
    ],
)  # fmt: skip
def test_each_setting_of_a_family_changes_its_logits(tiny_model, tmp_path, family, key, neutral):
    other = changed(tiny_model(family), tmp_path / "other", **{key: neutral})
    assert relative_error(ours(other), ours(tiny_model(family)).double()) > 1e-3


@pytest.mark.parametrize("part", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_a_fused_tensor_of_another_shape_is_refused_by_name(tiny_model, tmp_path, part):
    model = shutil.copytree(tiny_model("phi3"), tmp_path / "damaged")
    tensors = load_file(model / "model.safetensors")
    name = f"model.layers.1.{part}.weight"
    save_file(tensors | {name: tensors[name][:-16].clone()}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has shape .* config.json asks for"):
        run(model, [ask("a", IDS, max_tokens=1)])
