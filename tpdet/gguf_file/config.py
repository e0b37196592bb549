"""The `config.json` that a GGUF file stands for, as values by Hugging Face key.

`tpdet.model_config` then checks them as it checks those of a directory.
"""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tpdet.errors import CheckpointError
from tpdet.gguf_file.header import GgufHeader, read_header

ROTARY_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: the rotary scaling is read from it."""

REORDERING = ("llama",)
"""Architectures whose q and k rows llama.cpp's converter reorders."""

_FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""(architecture, model_type) by `general.architecture`. Mistral's files say "llama"."""

_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_ELSEWHERE = (
    *_SCALING, "rope.dimension_count", "attention.value_length", "attention.sliding_window",
    "rope.scaling.finetuned", "expert_count", "expert_used_count",
)  # fmt: skip
_DTYPES = {0: "float32", 1: "float16"}
"""By `general.file_type`; quantised files, and those in bf16, are served in bfloat16."""

# How Llama 3.1 and 3.2 scale: the file has the result, one factor a frequency, not the settings.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_SAME = 1e-4  # relative difference of factors that were computed in fp32


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Values as in `config.json`. Raises as `read_header`.

    Raises CheckpointError naming the field for an architecture or a setting that is not supported.
    """
    header = read_header(path)
    found = header.metadata
    name = found.get("general.architecture")
    if name not in _FAMILIES:
        _refuse(header, "general.architecture", f"only {', '.join(_FAMILIES)} are supported")
    if found.get("split.count", 1) not in (0, 1):
        _refuse(header, "split.count", "merge the parts with llama-gguf-split --merge")
    _check_keys(header, name)
    architecture, model_type = _FAMILIES[name]
    if found.get(f"{name}.attention.sliding_window"):
        architecture, model_type = "MistralForCausalLM", "mistral"
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _DTYPES.get(found.get("general.file_type", -1), "bfloat16"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    values |= {
        theirs: found[f"{name}.{ours}"]
        for ours, theirs in _SIZES.items()
        if f"{name}.{ours}" in found
    }
    values |= {
        theirs: _shortest(header, f"{name}.{ours}")
        for ours, theirs in _NUMBERS.items()
        if f"{name}.{ours}" in found
    }
    values["num_attention_heads"], values["num_key_value_heads"] = read_counts(header)
    values.setdefault("vocab_size", _vocabulary(header))
    if model_type == "mistral":
        values["sliding_window"] = found[f"{name}.attention.sliding_window"]
    _check_head_size(header, name, values)
    scaling = _scaling(header, name, values)
    if scaling:
        values["rope_scaling"] = scaling
    return values | _special_ids(header)


def read_counts(header: GgufHeader) -> tuple[int, int]:
    """(query heads, key heads), alike in every layer. Raises CheckpointError."""
    name = header.metadata.get("general.architecture")
    counts: list[int] = []
    for field in ("head_count", "head_count_kv"):
        key = f"{name}.attention.{field}"
        value = header.metadata.get(key, counts[0] if counts else None)
        if isinstance(value, list):
            if not value or len(set(map(str, value))) != 1:
                _refuse(header, key, "layers with different numbers of heads are not supported")
            value = value[0]
        if type(value) is not int or value < 1:
            _refuse(header, key, "it must be a whole number above 0")
        counts.append(value)
    return counts[0], counts[1]


def _check_keys(header: GgufHeader, name: str) -> None:
    """Refuse a setting of the model that is not known: it could change the arithmetic."""
    known = {*_SIZES, *_NUMBERS, *_ELSEWHERE}
    for key in sorted(header.metadata):
        prefix, _, field = key.partition(".")
        if prefix == name and field not in known:
            _refuse(header, key, "tpdet cannot tell whether it changes the arithmetic")
    for field in ("expert_count", "expert_used_count"):
        if header.metadata.get(f"{name}.{field}"):
            _refuse(header, f"{name}.{field}", "models with experts are not supported")


def _check_head_size(header: GgufHeader, name: str, values: dict[str, Any]) -> None:
    """Heads are rotated whole, and values have the size of keys."""
    size = values.get("head_dim")
    if size is None:
        hidden = values.get("hidden_size")
        size = hidden // values["num_attention_heads"] if type(hidden) is int else None
        values["head_dim"] = size
    for field in ("rope.dimension_count", "attention.value_length"):
        if header.metadata.get(f"{name}.{field}", size) != size:
            _refuse(
                header,
                f"{name}.{field}",
                f"only heads of one size, here {size}, rotated whole, are supported",
            )


def _vocabulary(header: GgufHeader) -> int:
    entry = header.tensors.get("token_embd.weight")
    if entry is None:
        raise CheckpointError(f"{header.path.name}: tensor token_embd.weight is missing")
    return entry.shape[0]


def _scaling(header: GgufHeader, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The object `rope_scaling`; {} for none."""
    kind, factor, original = (header.metadata.get(f"{name}.{key}") for key in _SCALING)
    if ROTARY_FACTORS in header.tensors:
        return _llama3(header, values)
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        _refuse(header, f"{name}.rope.scaling.type", "only linear and yarn are supported")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = original
    return found


def _llama3(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of which the factors come. Raises CheckpointError if there are none."""
    entry = header.tensors[ROTARY_FACTORS]
    if entry.kind != "F32" or len(entry.shape) != 1:
        raise CheckpointError(f"{header.path.name}: tensor {entry.name} is no vector of F32")
    with header.path.open("rb") as file:
        file.seek(entry.offset)
        factors = np.frombuffer(file.read(entry.size), np.float32)
    base, size = float(values.get("rope_theta", 10000.0)), values["head_dim"]
    factor = float(factors.max(initial=0.0))
    lengths = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = (_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / max(factor, 1.0) + smooth)
    expected = np.where(lengths < _ORIGINAL / _HIGH, 1.0, between)
    expected = np.where(lengths > _ORIGINAL / _LOW, factor, expected)
    if factors.shape != expected.shape or (abs(factors / expected - 1) > _SAME).any():
        raise CheckpointError(
            f"{header.path.name}: tensor rope_freqs.weight has other factors than the scaling of "
            f"Llama 3 (low {_LOW:g}, high {_HIGH:g}, of {_ORIGINAL} positions): not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _special_ids(header: GgufHeader) -> dict[str, Any]:
    found = header.metadata
    ids = [found.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = list(dict.fromkeys(each for each in ids if each is not None))
    begin = found.get("tokenizer.ggml.bos_token_id")
    return {"eos_token_id": ends or None} | ({} if begin is None else {"bos_token_id": begin})


def _shortest(header: GgufHeader, key: str) -> float:
    """The shortest decimal of a number that is stored in fp32: 1e-05, not 9.999999747378752e-06."""
    value = header.metadata[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(header, key, "it must be a number")
    return float(str(np.float32(value)))


def _refuse(header: GgufHeader, key: str, remedy: str) -> NoReturn:
    value = repr(header.metadata.get(key))
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    raise CheckpointError(f"{header.path.name}: {key} is {shown}: {remedy}")
