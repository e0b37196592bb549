"""Files as trainers and converters write them: other names of keys, leftovers, what is left out."""

import json
import re

import pytest
import transformers

from tests.checkpoint.model_config.test_model_config import LLAMA
from tests.checkpoint.model_config.test_text_parts import LLAVA
from tpdet.checkpoint.model_config import FAMILIES, load_model_config
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.model_config.text_defaults import completed
from tpdet.errors import CheckpointError

SIZES = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
COUNTS = {
    "qwen3_moe": "num_experts", "mixtral": "num_local_experts", "glm4_moe": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}  # fmt: skip
"""What transformers' classes call the number of experts."""
SPELLINGS = ("num_experts", "num_local_experts", "n_routed_experts")
TEXTS = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text",
    "qwen3_vl_text", "gemma2", "gemma3_text", "granite", "phi3",
)  # fmt: skip
NOT_COMPARED = {"architectures", "model_type", "bos_token_id", "eos_token_id", "dtype"}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved(family, folder):
    """A small configuration of a family as transformers writes it."""
    settings = SIZES | {"head_dim": 64}
    if family in COUNTS:
        settings |= {COUNTS[family]: 8, "num_experts_per_tok": 2}
    if family in ("qwen3_moe", "glm4_moe"):
        settings["moe_intermediate_size"] = 64
    config = transformers.AutoConfig.for_model(family, **settings)
    names = {each.name: name for name, each in FAMILIES.items()}
    config.architectures = [names[family]]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("family", COUNTS)
def test_experts_are_counted_under_every_name(tmp_path, family, name):
    written = saved(family, tmp_path)
    expected, form = load_model_config(tmp_path), read_stored_form(tmp_path)
    assert expected.experts == 8
    rest = {key: value for key, value in written.items() if key not in SPELLINGS}
    other = load_model_config(write(tmp_path, rest | {name: 8}))
    assert other == expected and read_stored_form(tmp_path) == form
    assert load_model_config(write(tmp_path, rest | dict.fromkeys(SPELLINGS, 8))) == expected
    with pytest.raises(CheckpointError, match=r"experts is [68]: .* is [68], keep one of"):
        load_model_config(write(tmp_path, rest | dict.fromkeys(SPELLINGS, 8) | {name: 6}))


@pytest.mark.parametrize("family", [family.name for family in FAMILIES.values()])
def test_a_key_left_out_means_what_it_means_to_transformers_or_is_refused(tmp_path, family):
    written, again = saved(family, tmp_path), tmp_path / "again"
    loaded = []
    for key in sorted(written.keys() - NOT_COMPARED):
        write(tmp_path, {k: v for k, v in written.items() if k != key})
        try:
            ours = load_model_config(tmp_path)
        except CheckpointError as error:
            own = "num_experts" if key in SPELLINGS and family == "qwen3_moe" else key
            assert re.search(f"{own} is missing|rope_scaling is None", str(error))
            continue
        loaded.append(key)
        transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(again)
        theirs = load_model_config(again)
        if key != "num_nextn_predict_layers":  # layers that nobody reads
            assert ours == theirs, key
    assert "tie_word_embeddings" in loaded or family == "smollm3"


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_part_has_the_defaults_of_its_class(kind):
    theirs = transformers.AutoConfig.for_model(kind)
    for key, value in completed(kind, {}).items():
        found = theirs.rope_parameters[key] if key == "rope_theta" else getattr(theirs, key, None)
        assert found == value or (value is None and found == theirs.num_attention_heads), key


LEFTOVERS = {
    "_name_or_path": "/home/me/run", "_commit_hash": None, "transformers_version": "4.51.3",
    "unsloth_version": "2025.1", "unsloth_fixed": True, "use_cache": False, "pretraining_tp": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_llama.Other"}, "max_window_layers": 21,
    "sliding_window": None, "use_sliding_window": False, "attention_dropout": 0.1,
    "hidden_dropout": 0.1, "output_router_logits": True, "output_hidden_states": True,
    "_attn_implementation": "flash_attention_2", "gradient_checkpointing": True,
    "neftune_noise_alpha": 5.0, "is_llama_config": True, "rope_interleaved": False,
    "quantization_config": None, "cache_implementation": "hybrid", "classifier_dropout": None,
    "head_dim": None, "rope_scaling": None, "layer_types": ["full_attention"] * 4,
    "tokenizer_class": "LlamaTokenizer", "processor_class": "P", "max_sequence_length": 4096,
    "id2label": {"0": "A"},
    "router_jitter_noise": 0.1, "ep_size": 1, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "original_max_position_embeddings": 2048, "mlp_bias": False, "model_max_length": 4096,
}  # fmt: skip


def test_what_trainers_leave_in_a_file_changes_nothing(tmp_path):
    plain = load_model_config(write(tmp_path, LLAMA))
    for key, value in LEFTOVERS.items():
        assert load_model_config(write(tmp_path, LLAMA | {key: value})) == plain, key
    assert load_model_config(write(tmp_path, LLAMA | LEFTOVERS)) == plain


def test_one_refusal_names_every_unknown_and_every_missing_key(tmp_path):
    lame = {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "rms_norm_eps")}
    with pytest.raises(CheckpointError) as found:
        load_model_config(write(tmp_path, lame | {"n_embd": 512, "norm_eps": 1e-5}))
    said = str(found.value)
    assert "unknown keys 'n_embd' (value 512), 'norm_eps' (value 1e-05): tpdet" in said
    assert said.endswith(
        "; hidden_size, rms_norm_eps are missing: a complete config.json states them"
    )
    many = {f"odd_{i}": i for i in range(20)}
    with pytest.raises(CheckpointError, match=r"'odd_13' .* and 14 more: tpdet cannot tell"):
        load_model_config(write(tmp_path, LLAMA | many))


def without(*keys):
    return lambda config: {key: value for key, value in config.items() if key not in keys}


def changed(**values):
    return lambda config: config | values


YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "said", "remedy"),
    [
        (LLAMA | {"n_embd": 1, "odd": 2}, "remove it only if", without("n_embd", "odd")),
        (LLAMA | {"num_experts": 8}, "remove it only if", without("num_experts")),
        (without("vocab_size", "rms_norm_eps")(LLAMA), "are missing",
         changed(vocab_size=9, rms_norm_eps=1e-5)),
        (LLAMA | {"torch_dtype": "float16", "dtype": "bfloat16"}, "choose one",
         without("torch_dtype")),
        (LLAMA | {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "keep one",
         without("rope_parameters")),
        (LLAMA | {"rope_scaling": YARN | {"rope_type": "linear"}}, "keep one",
         changed(rope_scaling=YARN)),
        (LLAMA | {"rope_parameters": {"rope_theta": 5e5}}, "keep one", without("rope_theta")),
        (LLAMA | {"rope_scaling": YARN | {"original_max_position_embeddings": 9},
                  "original_max_position_embeddings": 8}, "keep one",
         without("original_max_position_embeddings")),
        (LLAMA | {"sliding_window": 64}, "no sliding window", without("sliding_window")),
        (LLAVA | {"odd": 1}, "cannot tell", without("odd")),
    ],
)  # fmt: skip
def test_the_remedy_that_a_refusal_names_is_enough(tmp_path, config, said, remedy):
    with pytest.raises(CheckpointError, match=said):
        load_model_config(write(tmp_path, config))
    load_model_config(write(tmp_path, remedy(config)))
