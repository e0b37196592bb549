"""Configurations of well-known models, for random weights (`--load-format dummy`).

Only `config.json` is written: no weights and no tokenizer, so prompts are token ids
(`--skip-tokenizer-init`). The numbers are those of the published checkpoints.
"""

import json
import os
from pathlib import Path
from typing import Any

from tpdet.checkpoint.model_config import load_model_config
from tpdet.errors import NotFoundError, UsageError

_COMMON: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_MISTRAL = _COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _COMMON | {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN2 = _QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
}
_QWEN3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_TIED = {"tie_word_embeddings": True}


def _scaled_rope(factor: float) -> dict[str, Any]:
    """Positions of Llama 3.1 and 3.2, stretched by a factor."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": 131072, "rope_scaling": scaling}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = _sizes(hidden, intermediate, layers, heads)
    return _QWEN3 | {"max_window_layers": layers} | sizes


def _qwen3_moe(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    """128 experts of `width`, 8 of which a token takes, on every layer."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _qwen3(hidden, 8 * width, layers, heads) | experts


def _hybrid(hidden: int, layers: int, heads: int, key_heads: int, values: int) -> dict[str, Any]:
    """Three linear layers, then one with attention; values: heads of linear layers."""
    kinds = [*["linear_attention"] * 3, "full_attention"]
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 256,
        "layer_types": kinds * (layers // 4),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 248044,
        "eos_token_id": 248044,
    }


def _qwen35(intermediate: int, **sizes: int) -> dict[str, Any]:
    return _hybrid(**sizes) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": intermediate,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Experts of the hidden size, 4 of which a token takes; a window on every other layer."""
    kinds = ("sliding_attention", "full_attention")
    sizes = _sizes(2880, 2880, layers, 64)
    return (
        _COMMON
        | sizes
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": 64,
            "attention_bias": True,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "layer_types": [kinds[i % 2] for i in range(layers)],
            "num_local_experts": experts,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "bos_token_id": 199998,
            "eos_token_id": 200002,
        }
    )


_LLAMA_8B = _LLAMA | _sizes(4096, 14336, 32, 32)
_LLAMA_70B = _LLAMA | _sizes(8192, 28672, 80, 64)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "llama-3-8b": _LLAMA_8B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3-405b": _LLAMA | _sizes(16384, 53248, 126, 128) | _scaled_rope(8.0),
    "qwen2.5-7b": _QWEN2 | _sizes(3584, 18944, 28, 28) | {"num_key_value_heads": 4},
    "qwen2.5-14b": _QWEN2 | _sizes(5120, 13824, 48, 40) | {"max_window_layers": 70},
    "qwen2.5-32b": _QWEN2 | _sizes(5120, 27648, 64, 40) | {"max_window_layers": 70},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16) | _TIED,
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16) | _TIED,
    "qwen3-4b": _qwen3(2560, 9728, 36, 32) | _TIED,
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3.5-9b": _qwen35(12288, hidden=4096, layers=32, heads=16, key_heads=4, values=32),
    "qwen3.6-27b": _qwen35(17408, hidden=5120, layers=64, heads=24, key_heads=4, values=48),
    "qwen3.5-35b-a3b": _hybrid(2048, 40, 16, 2, 32)
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3-next-80b-a3b": _hybrid(2048, 48, 16, 2, 32)
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "mixtral-8x7b": _MISTRAL
    | _sizes(4096, 14336, 32, 32)
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm-4.5-air": _COMMON
    | _sizes(4096, 10944, 46, 96)
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    },
    "llama-3.1-8b": _LLAMA_8B | _scaled_rope(8.0),
    "llama-3.1-70b": _LLAMA_70B | _scaled_rope(8.0),
    "llama-3.2-1b": _LLAMA
    | _sizes(2048, 8192, 16, 32)
    | _scaled_rope(32.0)
    | _TIED
    | {"head_dim": 64},
    "llama-3.2-3b": _LLAMA | _sizes(3072, 8192, 28, 24) | _scaled_rope(32.0) | _TIED,
    "mistral-7b": _MISTRAL | _sizes(4096, 14336, 32, 32),
}

PUBLISHED = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-405B": "llama-3-405b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-14B-Instruct": "qwen2.5-14b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "Qwen/Qwen3.6-27B": "qwen3.6-27b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
}
"""Hub names of checkpoints that have a shape."""


def write_shape(directory: Path | str, name: str) -> Path:
    """Write the `config.json` of a shape. Raises UsageError for unknown names and used folders."""
    directory = Path(directory)
    if name not in SHAPES:
        raise UsageError(f"model shape {name!r}: use one of {', '.join(SHAPES)}")
    if directory.exists() and any(os.scandir(directory)):
        raise UsageError(f"{directory} is not empty: choose another directory or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    load_model_config(directory)
    return directory


def is_shape(model: str) -> bool:
    """Whether a model is named that has no directory, but a shape."""
    return model in SHAPES and not Path(model).exists()


def directory_of(model: str, load_format: str, folder: Path) -> str:
    """A model as it was named; for random weights also a shape, whose config goes to `folder`.

    Raises NotFoundError for a shape whose weights would have to be read.
    """
    if not is_shape(model):
        return model
    if load_format != "dummy":
        raise NotFoundError(f"model {model!r} is a shape without weights: add --load-format dummy")
    written = folder / model
    return str(written if written.exists() else write_shape(written, model))
