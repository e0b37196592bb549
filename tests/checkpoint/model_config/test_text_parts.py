"""Image models as their makers published them: the text part is the one that transformers reads."""

import json

import pytest
import transformers

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.errors import CheckpointError

SMOL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49280,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 100000, "rope_interleaved": False,
    "is_llama_config": True, "is_composition": True, "use_resampler": False,
    "qk_layer_norms_perceiver": False, "pixel_shuffle_factor": 4, "neftune_noise_alpha": 0.0,
    "torch_dtype": "bfloat16", "_flash_attn_2_enabled": True,
    "perceiver_config": {"model_type": "vllama3"},
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}  # fmt: skip
SMOLVLM = {
    "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3",
    "image_seq_len": 64, "image_token_id": 49190, "scale_factor": 4, "text_config": SMOL,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False,
    "use_reentrant_checkpointing": False, "vision_config": {"model_type": "idefics3"},
    "vocab_size": 49280, "pad_token_id": 2, "eos_token_id": 49279,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_token_id": 151654, "image_token_id": 151655,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "vocab_size": 151936,
    "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
    "ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu",
    "pad_token_id": 32001, "tie_word_embeddings": False, "torch_dtype": "float16",
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "vision_config": {"model_type": "clip_vision_model"},
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
        "torch_dtype": "float16", "vocab_size": 32064,
    },
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    "torch_dtype": "bfloat16", "vocab_size": 32064,
}  # fmt: skip
VISION = {"model_type": "siglip_vision_model"}
PUBLISHED = {
    "SmolVLM": SMOLVLM,
    "granite-docling": SMOLVLM | {"text_config": SMOL | {"vocab_size": 100352},
                                  "vocab_size": 100352, "tie_word_embeddings": True},
    "Qwen2.5-VL": QWEN,
    "Qwen2.5-VL, of two versions": QWEN | {"text_config": {
        key: value for key, value in QWEN.items() if key not in ("vision_config", "architectures")
    } | {"model_type": "qwen2_5_vl_text"}},
    "Qwen2.5-VL, named as the whole": QWEN | {"text_config": {
        key: QWEN[key] for key in ("hidden_size", "num_attention_heads", "rope_scaling")
    } | {"model_type": "qwen2_5_vl"}},
    "Qwen2-VL": QWEN | {"architectures": ["Qwen2VLForConditionalGeneration"],
                        "model_type": "qwen2_vl"},
    "LLaVA-1.5": LLAVA,
    "LLaVA-1.5, the text part unnamed": LLAVA | {"text_config": {"vocab_size": 32064}},
    "LLaVA-1.6 of Mistral": LLAVA | {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672]], "use_image_newline_parameter": True,
        "text_config": MISTRAL,
    },
    "Gemma 3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16", "vision_config": VISION,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
    "Qwen3-VL": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "image_token_id": 151655, "tie_word_embeddings": True, "vision_config": {"depth": 24},
        "text_config": {
            "model_type": "qwen3_vl_text", "dtype": "bfloat16", "hidden_size": 2048,
            "num_key_value_heads": 8, "num_hidden_layers": 28, "num_attention_heads": 16,
            "intermediate_size": 6144, "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"
            },
        },
    },
}  # fmt: skip
"""Reduced to their keys."""


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_part_is_that_of_transformers(tmp_path, name):
    ours = load_model_config(write(tmp_path, PUBLISHED[name]))
    whole = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = whole.text_config
    rotary = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers) == (
        *(theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size),
        theirs.num_hidden_layers,
    )
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps) == (
        *(theirs.num_attention_heads, theirs.num_key_value_heads, size),
        theirs.rms_norm_eps,
    )
    assert (ours.rotary.theta, ours.max_position) == (
        rotary["rope_theta"],
        theirs.max_position_embeddings,
    )
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    windows = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.num_layers
    assert [w is not None for w in ours.windows] == [k == "sliding_attention" for k in windows]
    assert ours.dtype == str(whole.dtype or theirs.dtype).removeprefix("torch.")
    assert read_stored_form(tmp_path).text_part


def test_the_keys_outside_count_as_transformers_has_it(tmp_path):
    inside = LLAVA["text_config"] | {"eos_token_id": 7, "torch_dtype": "bfloat16"}
    config = load_model_config(write(tmp_path, LLAVA | {"text_config": inside, "hidden_size": 64}))
    assert (config.hidden_size, config.eos_token_ids, config.dtype) == (4096, (7,), "float16")
    both = LLAVA | {"text_config": inside, "eos_token_id": 9}
    assert load_model_config(write(tmp_path, both)).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"text_config": {"surprise": 1}}, "unknown key 'text_config.surprise'"),
        ({"text_config": {"model_type": "gemma"}}, "text_config.model_type is 'gemma'"),
        ({"text_config": {"model_type": "qwen2_5_vl"}}, "text_config.model_type is 'qwen2_5_vl'"),
        ({"text_config": []}, "text_config is .*: it must be an object"),
        ({"model_type": "paligemma"}, "model_type is 'paligemma': beside a text_config only"),
        ({"architectures": ["LlavaModel"]}, "of llava one that ends in ForConditionalGeneration"),
    ],
)
def test_what_is_not_known_of_an_image_model_is_refused(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write(tmp_path, LLAVA | change))
