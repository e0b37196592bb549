"""Configurations of well-known models, for random weights (`--load-format dummy`).

Only `config.json` is written: no weights and no tokenizer, so prompts are token ids
(`--skip-tokenizer-init`). The numbers are those of the published checkpoints.
"""

import json
import os
from pathlib import Path
from typing import Any

from tpdet.errors import UsageError
from tpdet.model_config import load_model_config

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
    },
    "llama-3-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama-3-70b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "vocab_size": 128256,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama-3-405b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "vocab_size": 128256,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}

PUBLISHED = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-405B": "llama-3-405b",
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
