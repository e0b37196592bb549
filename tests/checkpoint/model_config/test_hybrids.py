"""Hybrids of linear and full attention: their configurations, and what is refused by name."""

import json

import pytest
import transformers

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_modes, check_ranks
from tpdet.checkpoint.model_config.known_shapes import SHAPES, write_shape
from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.errors import CheckpointError, UsageError

TYPES = [*["linear_attention"] * 3, "full_attention"]
DENSE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": TYPES * 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
SPARSE = {key: value for key, value in DENSE.items() if key != "intermediate_size"} | EXPERTS
SPARSE |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
NEXT = DENSE | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
WHOLE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "bos_token_id": 248044, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 17408, "layer_types": TYPES * 16,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
        "output_gate_type": "swish", "pad_token_id": None, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}  # fmt: skip
"""The `config.json` of Qwen3.6-27B, but for keys inside `vision_config`."""


def load(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize("values", [DENSE, SPARSE, NEXT], ids=["dense", "experts", "next"])
def test_a_hybrid_is_read(tmp_path, values):
    config = load(tmp_path, values)
    assert config.linear == LinearAttention((True, True, True, False) * 2, 8, 16, 64, 128)
    assert config.linear.values_of_a_key == 2 and config.attention_layers == 2
    assert config.attention_gate and config.qk_norm and config.norm == "rms_plus_one"
    assert config.rotary.dim == 64 and config.head_dim == 256
    if values is not DENSE:
        mixture = config.mixture
        assert (mixture.shared, mixture.shared_gate) == ("shared_expert", "shared_expert_gate")
        assert mixture.shared_width == 128 and mixture.routing.over_chosen


def test_a_published_checkpoint_with_images_is_read(tmp_path):
    config = load(tmp_path, WHOLE)
    assert (config.family, config.num_layers, config.attention_layers) == ("qwen3_5_text", 64, 16)
    assert config.linear.value_heads == 48 and config.rotary.theta == 1e7
    assert config.eos_token_ids == (248044,) and config.max_position == 262144
    for ranks in (1, 2, 4, 8):
        check_ranks(config, ranks, None)


@pytest.mark.parametrize("name", [n for n in SHAPES if "linear_num_key_heads" in SHAPES[n]])
def test_a_known_shape_says_the_dtype_of_states_that_its_checkpoint_says(tmp_path, name):
    written = write_shape(tmp_path / name, name) / "config.json"
    config = json.loads(written.read_text())
    silent = config["model_type"] == "qwen3_next"
    said = None if silent else WHOLE["text_config"]["mamba_ssm_dtype"]
    assert config.get("mamba_ssm_dtype") == said
    assert load_model_config(written.parent).linear is not None


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"])
def test_what_transformers_writes_today_is_read(tmp_path, name):
    values = SPARSE if "Moe" in name else NEXT if "Next" in name else DENSE
    fields = {k: v for k, v in values.items() if k not in ("architectures", "model_type")}
    written = getattr(transformers, f"{name}Config")(**fields).to_dict()
    config = load(tmp_path, written | {"architectures": values["architectures"]})
    (tmp_path / "plain").mkdir()
    assert config == load(tmp_path / "plain", values)


def test_layers_are_named_by_their_interval_where_no_list_names_them(tmp_path):
    values = {key: value for key, value in DENSE.items() if key != "layer_types"}
    assert load(tmp_path, values).linear.layers == (True, True, True, False) * 2
    every_other = load(tmp_path, values | {"full_attention_interval": 2})
    assert every_other.linear.layers == (True, False) * 4


def test_a_list_of_full_attention_alone_has_no_linear_layers(tmp_path):
    config = load(tmp_path, DENSE | {"layer_types": ["full_attention"] * 8})
    assert config.linear is None and config.attention_gate


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"full_attention_interval": 2}, "full_attention_interval is 2: by it layer 1 is full_"),
        ({"layer_types": TYPES}, "layer_types is .* one type for each of the 8 layers"),
        ({"layer_types": ["sliding_attention"] * 8}, "'sliding_attention' is not supported, only"),
        ({"layer_types": ["linear_attention"] * 8}, "no layer has full_attention"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"layer_types": [*TYPES, *TYPES[:3], 0]}, "layer_types is .* one type for each of the 8"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": None, "full_attention_interval": 9}, "interval is 9: no layer has full"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"linear_num_key_heads": 1 << 13}, "linear_num_key_heads is 8192"),
        ({"linear_value_head_dim": 512}, "linear_value_head_dim is 512: it must lie in"),
        ({"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim is True"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3: only 4 is supported"),
        (
            {"linear_num_value_heads": 12},
            "linear_num_value_heads is 12: it must be a multiple of 8",
        ),
        ({"linear_num_value_heads": 4}, "linear_num_value_heads is 4: it must be a multiple of 8"),
        ({"linear_key_head_dim": 60}, "linear_key_head_dim is 60: only multiples of 8"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"attn_output_gate": False}, "attn_output_gate is False: attention without a gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': only swish"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16': states are fp32"),
        ({"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers is 'one'"),
    ],
)
def test_a_hybrid_that_cannot_be_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, DENSE | changes)


def test_leaves_are_whole_groups_of_a_key_head(tmp_path):
    config = load(tmp_path, DENSE | {"linear_num_key_heads": 4})
    assert check_ranks(config, 4, None).count == 4
    said = r"tensor-parallel size 8 .* 4 key heads of linear layers .* use one of 1, 2, 4$"
    with pytest.raises(UsageError, match=said):
        check_ranks(config, 8, None)
    with pytest.raises(UsageError, match=r"leaves 8 do not divide 4 key heads .* one of 1, 2, 4"):
        check_ranks(config, 4, 8)
    odd = load(tmp_path, DENSE | {"linear_num_key_heads": 3, "linear_num_value_heads": 9})
    assert check_ranks(odd, 1, None).count == 1
    with pytest.raises(UsageError, match="use one of 1"):
        check_ranks(odd, 2, None)


def test_experts_and_key_heads_are_divided_by_the_same_leaves(tmp_path):
    config = load(tmp_path, SPARSE | {"num_experts": 12})
    assert check_ranks(config, 4, None).count == 4


def test_approximate_arithmetic_is_refused_by_name(tmp_path):
    config = load(tmp_path, DENSE)
    check_modes(config, "gather", approximate=False)
    with pytest.raises(UsageError, match="no approximate mode, as it has linear attention"):
        check_modes(config, "fold", approximate=True)
