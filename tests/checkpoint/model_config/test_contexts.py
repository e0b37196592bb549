"""How long a text a configuration allows: what its page says of a rotary scaling is counted in."""

import json

import gguf
import pytest

from tests.checkpoint.gguf.gguf_models import write_gguf
from tests.checkpoint.model_config.test_model_config import (
    GEMMA3,
    LLAMA,
    LONGROPE,
    OLMO3,
    PHI3,
    QWEN2,
    SMOLLM3,
)
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import context_length
from tpdet.errors import CheckpointError, UsageError

ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MINISTRAL3 = LLAMA | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
MINISTRAL3.pop("rope_theta")
GROWTH = {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
BASE = {"rope_theta": 10000.0}
BY_TYPE = {"full_attention": YARN | BASE, "sliding_attention": BASE | {"rope_type": "default"}}


def load(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


def without_theta(config):
    return {key: value for key, value in config.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (LLAMA, 4096),
        (LLAMA | {"rope_scaling": {"rope_type": "default"}}, 4096),
        # YaRN as the cards switch it on, in both styles
        (LLAMA | {"rope_scaling": YARN}, 16384),
        (QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4, ORIGINAL: 4096}}, 16384),
        (SMOLLM3 | {"rope_scaling": YARN | {"factor": 2.5}}, 10240),
        (without_theta(LLAMA) | {"rope_parameters": YARN | {"rope_theta": 1e6}}, 16384),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}, ORIGINAL: 2048}, 8192),
        (LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.1, "beta_fast": 64}}, 16384),
        (LLAMA | {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": 1}}, 16384),
        (LLAMA | {"rope_scaling": YARN, "max_position_embeddings": 5120}, 16384),
        (LLAMA | {"rope_scaling": YARN | {"type": "yarn", "finetuned": True}}, 16384),
        (LLAMA | {"rope_scaling": YARN | {"factor": 1e12}}, 2**31 - 1),
        # a context that counts it in, or is longer still, stays
        (LLAMA | {"rope_scaling": YARN, "max_position_embeddings": 16384}, 16384),
        (LLAMA | {"rope_scaling": YARN, "max_position_embeddings": 20480}, 20480),
        (LLAMA | {"rope_scaling": YARN | {"factor": None},
                  "max_position_embeddings": 20480}, 20480),
        # the other kinds, as their pages have it
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, ORIGINAL: 2048}}, 4096),
        (GEMMA3, 131072),
        (LLAMA | {"rope_scaling": LLAMA3 | {ORIGINAL: 1024}}, 4096),
        (PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75, ORIGINAL: 1024}, 1024),
        # layers with a window rotate unscaled and shorten nothing
        (OLMO3 | {"rope_scaling": YARN}, 16384),
        (without_theta(OLMO3) | {"rope_parameters": BY_TYPE}, 16384),
        (MINISTRAL3 | {"rope_parameters": YARN | GROWTH}, 4096),
        (MINISTRAL3 | {"rope_parameters": YARN | GROWTH | {"llama_4_scaling_beta": 0}}, 16384),
    ],
)  # fmt: skip
def test_the_context_is_the_one_that_the_scaling_makes(tmp_path, config, context):
    assert load(tmp_path, config).max_position == context


def test_the_original_context_counts_wherever_it_stands(tmp_path):
    inside = load(tmp_path, LLAMA | {"rope_scaling": YARN | {ORIGINAL: 2048}})
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert load(tmp_path, LLAMA | {"rope_scaling": yarn, ORIGINAL: 2048}) == inside
    assert load(tmp_path, LLAMA | {"rope_scaling": yarn}).rotary != inside.rotary
    assert load(tmp_path, LLAMA | {ORIGINAL: 2048}) == load(tmp_path, LLAMA)
    with pytest.raises(CheckpointError, match=f"{ORIGINAL} is 512: the rotary scaling says 4096"):
        load(tmp_path, LLAMA | {"rope_scaling": YARN, ORIGINAL: 512})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({}, "4096: lower it, or if the model's card says how to go on, write its rope_scaling"),
        (YARN, "16384, with yarn scaling of factor 4 counted in: lower it, or state a higher fac"),
        ({"type": "linear", "factor": 2}, "8192, with linear scaling of factor 2 counted in"),
        (LLAMA3 | {ORIGINAL: 1024}, "4096, with llama3 .* higher max_position_embeddings"),
    ],
)
def test_a_longer_text_is_refused_with_a_word_of_the_scaling(tmp_path, scaling, words):
    model = load(tmp_path, LLAMA | {"rope_scaling": scaling})
    assert context_length(model.max_position, model) == model.max_position
    with pytest.raises(UsageError, match=f"is over the model's context of {words}"):
        context_length(model.max_position + 1, model)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75, ORIGINAL: 1024}, "longr"),
        (MINISTRAL3 | {"rope_parameters": YARN | GROWTH}, "yarn"),
    ],
)
def test_a_context_that_ends_early_says_why(tmp_path, config, kind):
    model = load(tmp_path, config)
    with pytest.raises(UsageError, match=f"where {kind}.* would change its arithmetic: lower it"):
        context_length(model.max_position + 1, model)


def test_a_gguf_file_has_the_context_of_its_scaling(tiny_model, tmp_path):
    def scale(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(2048)

    model = load_model_config(write_gguf(tiny_model("llama"), tmp_path / "a.gguf", change=scale))
    assert (model.rotary.kind, model.max_position) == ("yarn", 8192)
