"""Configurations of the families are read exactly; everything else is refused by name."""

import json

import pytest
import torch
import transformers

from tpdet.checkpoint.model_config import load_model_config
from tpdet.errors import CheckpointError, NotFoundError
from tpdet.kernels.exact.rotary_frequencies import RotarySpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def load(tmp_path, config, generation=None, dtype="auto"):
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(tmp_path, dtype)


def test_a_plain_llama_is_read(tmp_path):
    config = load(tmp_path, LLAMA)
    assert (config.family, config.num_heads, config.num_kv_heads) == ("llama", 8, 4)
    assert (config.dtype, config.rms_norm_eps) == ("bfloat16", 1e-5)
    assert config.windows == (None,) * 4
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings and not config.attention_bias and not config.qk_norm


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Ministral3", "SmolLM3", "Granite", "SeedOss"),
        *("Phi3", "Olmo2", "Olmo3"),
    ],
)
def test_what_transformers_writes_today_is_read(tmp_path, family):
    """Saved by the installed transformers, in its own style of keys."""
    fields = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type")}
    written = getattr(transformers, f"{family}Config")(**fields)
    written.architectures = [f"{family}ForCausalLM"]
    written.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.family == written.model_type
    assert config.attention_bias == (family in ("Qwen2", "SeedOss"))
    assert config.qk_norm == (family in ("Qwen3", "Olmo2", "Olmo3"))
    assert config.rotary.theta == (1e6 if family == "Ministral3" else 10000.0)
    assert config.tie_word_embeddings == (family == "SmolLM3")
    assert config.rotary_layers == ((True, True, True, False) if family == "SmolLM3" else ())
    assert config.max_position == 4096
    assert family != "Olmo3" or config.windows == (4096, 4096, 4096, None)
    assert (config.qk_norm_over, bool(config.layer_norms[1])) == (
        ("row", True) if family.startswith("Olmo") else ("head", False)
    )


def test_end_tokens_come_from_the_generation_configuration_first(tmp_path):
    assert load(tmp_path, LLAMA, {"eos_token_id": [9, 7, 9]}).eos_token_ids == (9, 7)
    assert load(tmp_path, LLAMA, {"temperature": 0.6}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "linear", "factor": 2.0}, "linear"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            "llama3",
        ),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, "yarn"),
        ({"rope_type": "default"}, "default"),
    ],
)  # fmt: skip
def test_rotary_scaling_is_read_in_both_styles(tmp_path, scaling, kind):
    old = load(tmp_path, LLAMA | {"rope_scaling": scaling, "rope_theta": 5e5}).rotary
    modern = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new = load(tmp_path, modern | {"rope_parameters": scaling | {"rope_theta": 5e5}}).rotary
    assert old == new
    assert (old.kind, old.theta, old.dim) == (kind, 5e5, 64)


def test_windows_are_those_transformers_applies(tmp_path):
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert load(tmp_path, mistral | {"sliding_window": 128}).windows == (128,) * 4
    assert load(tmp_path, mistral | {"sliding_window": None}).windows == (None,) * 4
    assert load(tmp_path, mistral).windows == (4096,) * 4
    slide = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}
    assert load(tmp_path, QWEN2 | slide).windows == (None, None, None, 128)
    assert load(tmp_path, QWEN2 | slide | {"use_sliding_window": False}).windows == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert load(tmp_path, QWEN2 | slide | {"layer_types": types}).windows == (128, None, 128, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures.*Gemma.*only one of Llama"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures"),
        ({"model_surprise": 1}, "unknown key 'model_surprise'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only silu"),
        ({"use_sliding_window": True}, "use_sliding_window is True: this family has no"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "as MLX quantises them"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.*dynamic"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            r"rope_scaling\.short_factor is None: longrope needs a list of 32 numbers",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, r"rope_scaling\.factor is -1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "odd": 1}},
            r"unknown key 'rope_scaling\.odd'",
        ),
        ({"num_key_value_heads": 3}, "it must divide num_attention_heads 8"),
        ({"head_dim": 81}, "head_dim is 81: only even sizes up to 256"),
        ({"head_dim": 512}, "head_dim is 512: only even sizes up to 256"),
        ({"head_dim": None, "hidden_size": 24}, "hidden_size is 24: it makes heads of 3, only"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "512"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"torch_dtype": None}, "names none"),
        ({"dtype": "float32"}, "torch_dtype.*dtype says 'float32'"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000: .* \[1, 4096\]"),
        ({"vocab_size": 2**30}, r"vocab_size is .* \[1, 16777216\]"),
        ({"hidden_size": 2**30, "head_dim": 64}, r"hidden_size is .* \[1, 1048576\]"),
        ({"intermediate_size": 2**30}, r"intermediate_size is .* \[1, 1048576\]"),
        ({"num_attention_heads": 2**30}, r"num_attention_heads is .* \[1, 16384\]"),
        ({"architectures": [{}]}, "architectures"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2}}, "rope_type"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
            "low_freq_factor is missing|missing",
        ),
        ({"torch_dtype": "float64"}, "torch_dtype.*float64"),
        ({"sliding_window": 128}, "Llama has no sliding window"),
        ({"eos_token_id": -4}, "eos_token_id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, LLAMA | change)


PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": {}}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
SEED_OSS = LLAMA | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
LONGROPE = {"type": "su", "short_factor": [1.5] * 24, "long_factor": [9.0] * 24}


def test_longrope_is_read_with_its_original_context(tmp_path):
    change = {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}
    config = load(tmp_path, PHI3 | change | {"original_max_position_embeddings": 1024})
    assert (config.rotary.kind, config.rotary.dim, config.max_position) == ("longrope", 48, 1024)
    assert config.rotary.frequency_factors == (1.5,) * 24
    assert config.rotary.attention_factor == pytest.approx((1 + 2 / 10) ** 0.5)


def test_layers_without_rotary_are_those_of_transformers(tmp_path):
    slide = {"use_sliding_window": True, "sliding_window": 64}
    config = load(tmp_path, SMOLLM3 | slide | {"no_rope_layer_interval": 2})
    assert config.rotary_layers == (True, False, True, False)
    assert config.windows == (None, 64, None, 64)
    assert load(tmp_path, SMOLLM3 | {"no_rope_layers": [1] * 4}).rotary_layers == ()


OLMO3 = LLAMA | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_old_and_new_keys_scale_the_layers_without_a_window_alone(tmp_path):
    old = load(tmp_path, OLMO3 | {"rope_scaling": YARN, "sliding_window": 64})
    assert (old.rotary.kind, old.rotary.factor, old.rotary.theta) == ("yarn", 4.0, 10000.0)
    assert old.window_rotary == RotarySpec("default", 10000.0, 64)
    assert [old.rotary_of(i) for i in (2, 3)] == [old.window_rotary, old.rotary]
    assert old.windows == (64, 64, 64, None)
    base = {"rope_theta": 10000.0}
    kinds = {"full_attention": YARN | base, "sliding_attention": base}
    types = ["sliding_attention"] * 3 + ["full_attention"]
    new = {k: v for k, v in OLMO3.items() if k != "rope_theta"} | {"rope_parameters": kinds}
    assert load(tmp_path, new | {"sliding_window": 64, "layer_types": types}) == old
    alike = load(tmp_path, OLMO3)
    assert alike.window_rotary is None and alike.rotaries == (alike.rotary,)


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640,
    "intermediate_size": 2560, "num_hidden_layers": 7, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 512,
}  # fmt: skip
"""As published: what is missing has the values of transformers."""


def test_a_gemma_has_the_values_that_its_checkpoints_leave_out(tmp_path):
    config = load(tmp_path, GEMMA3)
    theirs = transformers.Gemma3TextConfig(num_hidden_layers=7)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
        *(theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads),
        theirs.head_dim,
    )
    assert (config.max_position, config.rms_norm_eps) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
    )
    assert config.windows == (512,) * 5 + (None, 512) and config.tie_word_embeddings
    assert (config.rotary.kind, config.rotary.theta) == ("linear", 1e6)
    assert config.window_rotary == RotarySpec("default", 10000.0, 256)
    assert (config.norm, config.activation) == ("rms_plus_one", "gelu_tanh")
    assert config.query_key_scale == 1.0  # of 256 values a head, query_pre_attn_scalar is 256
    assert config.embedding_scale == torch.tensor(640**0.5).bfloat16().item() != 640**0.5
    half = load(tmp_path, GEMMA3, dtype="float16")
    assert half.embedding_scale == torch.tensor(640**0.5).half().item()


GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_act": None,
    "query_pre_attn_scalar": 64,
}


def test_soft_caps_are_those_of_transformers_unless_null(tmp_path):
    config = load(tmp_path, GEMMA2)
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    assert config.windows == (4096, None) * 2 and config.window_rotary is None
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    plain = load(tmp_path, GEMMA2 | none)
    assert (plain.attention_cap, plain.logit_cap) == (0.0, 0.0)


def test_what_transformers_writes_of_a_gemma_is_read(tmp_path):
    theirs = transformers.Gemma3TextConfig(num_hidden_layers=7, hidden_size=640, dtype="float32")
    theirs.architectures = ["Gemma3ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.windows == (4096,) * 5 + (None, 4096)
    assert (config.rotary.theta, config.window_rotary.theta) == (1e6, 10000.0)


STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
} | {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type", "hidden_act")}
del STARCODER2["rms_norm_eps"]


def test_a_starcoder2_is_read(tmp_path):
    config = load(tmp_path, STARCODER2 | {"sliding_window": 64, "embedding_dropout": 0.1})
    assert (config.norm, config.activation, config.rms_norm_eps) == ("layer", "gelu_tanh", 1e-5)
    assert config.attention_bias and config.row_bias and config.tie_word_embeddings
    assert config.windows == (64,) * 4 and config.norm_values == 2 * config.hidden_size
    theirs = transformers.Starcoder2Config(dtype="float32", bos_token_id=1, eos_token_id=2)
    theirs.architectures = ["Starcoder2ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).windows == (None,) * 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (STARCODER2 | {"use_bias": False}, "use_bias is False: a checkpoint without biases"),
        (STARCODER2 | {"norm_type": "rms_norm"}, "norm_type is 'rms_norm': only layer_norm"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: Gemma 3"),
        (GEMMA2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        (GEMMA2 | {"sliding_window_size": 64}, "sliding_window_size is 64: sliding_window says"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu': only gelu_pyt"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "tokens see those before them alone"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (OLMO3 | {"sliding_window": None}, "sliding_window is None: layers with a window"),
        (OLMO3 | {"rope_parameters": YARN}, "rope_parameters.factor' .* this family names"),
        (OLMO3 | {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}},
         "full_attention.rope_theta is 9.0: rope_theta outside is 10000"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "no such setting of default"),
        (PHI3 | {"partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3: it must leave"),
        (PHI3 | {"rope_scaling": LONGROPE}, "short_factor is .* needs a list of 32"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 24},
                 "partial_rotary_factor": 0.75}, "long_factor is .* every factor"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias is True"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers is .* each of the 4 layers"),
        (SMOLLM3 | {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is .* 0 and 1"),
        (SEED_OSS | {"attention_out_bias": True}, "attention_out_bias is True"),
        (SEED_OSS | {"mlp_bias": True}, "mlp_bias is True"),
        (GRANITE | {"residual_multiplier": 0}, "residual_multiplier is 0"),
        (GRANITE | {"logits_scaling": "8"}, "logits_scaling is '8'"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_do_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": NaN}', "NaN is not"),
        ("[1]", "holds list, not an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        (" " * (1 << 21), "over the limit of 1048576 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)


def test_a_named_dtype_wins_over_the_checkpoints(tmp_path):
    assert load(tmp_path, LLAMA, dtype="float32").dtype == "float32"
    assert load(tmp_path, LLAMA | {"torch_dtype": "float64"}, dtype="float32").dtype == "float32"
