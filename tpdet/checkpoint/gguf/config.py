"""The `config.json` that a GGUF file stands for, as values by Hugging Face key.

`tpdet.checkpoint.model_config` then checks them as it checks those of a directory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpdet.checkpoint.gguf.header import GgufHeader, read_header
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.errors import CheckpointError

ROTARY_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: the rotary scaling is read from it."""

REORDERING = ("llama",)
"""Architectures whose q and k rows llama.cpp's converter reorders."""

TILED = ("qwen35", "qwen35moe")
"""Architectures of whose linear layers the converter reorders the value heads."""

HYBRIDS = ("qwen3next", *TILED)
"""Architectures with linear attention."""

_FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
"""(architecture, model_type) by `general.architecture`. Mistral's files say "llama"."""

_ARCHITECTURE = "general.architecture"
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.key_length": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip
_COUNTS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_WINDOW = "attention.sliding_window"
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_EXPERTS = ("expert_count", "expert_used_count")
_OF_HEADS = ("rope.dimension_count", "attention.value_length")
_ELSEWHERE = (*_SCALING, *_EXPERTS, *_OF_HEADS, _WINDOW, "rope.scaling.finetuned")
_GUESSING, _INNER, _SECTIONS = "nextn_predict_layers", "ssm.inner_size", "rope.dimension_sections"
_LINEAR_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_EXPERT_SIZES = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_OF_HYBRIDS = {
    name: _SIZES | _LINEAR_SIZES | (_EXPERT_SIZES if name != "qwen35" else {}) for name in HYBRIDS
}
"""By architecture, fields that are keys of `config.json`."""
_LINEAR_ELSEWHERE = (_GUESSING, _INNER, _SECTIONS)
_DTYPES = {0: "float32", 1: "float16"}
"""By `general.file_type`; quantised files, and those in bf16, are served in bfloat16."""
_OTHER_TYPE = 2
_LARGEST_HEAD = 1 << 16  # which sizes are served is checked where heads are

# How Llama 3.1 and 3.2 scale: the file has the result, one factor a frequency, not the settings.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_SAME = 1e-4  # relative difference of factors that were computed in fp32


class GgufConfig(NamedTuple):
    """The values of a `config.json`, and the file's own names of those keys, for messages."""

    values: dict[str, Any]
    names: Mapping[str, str]


def metadata(header: GgufHeader) -> Fields:
    """The fields of a file, each read by type and range; refusals name file, field and value."""
    return Fields(header.metadata, header.path.name, complete="a complete GGUF file states it")


def read_gguf_config(path: Path) -> GgufConfig:
    """Values as in `config.json`. Raises as `read_header`.

    Raises CheckpointError naming the field for an architecture or a setting that is not supported.
    """
    header = read_header(path)
    found = metadata(header)
    name = _architecture(found)
    _check_fields(header, found, name)
    sizes = _OF_HYBRIDS.get(name, _SIZES)
    theirs = {f"{name}.{ours}": key for ours, key in (sizes | _COUNTS | _NUMBERS).items()}
    architecture, model_type = _FAMILIES[name]
    window = found.integer(f"{name}.{_WINDOW}", 0, low=0)
    if window and name not in REORDERING:
        found.refuse(f"{name}.{_WINDOW}", "only files of llama (Mistral) have a window")
    if window:
        architecture, model_type = "MistralForCausalLM", "mistral"
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _DTYPES.get(found.integer("general.file_type", _OTHER_TYPE, low=0), "bfloat16"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for ours in sizes:
        if f"{name}.{ours}" in found:
            values[theirs[f"{name}.{ours}"]] = found.integer(f"{name}.{ours}")
    for ours in _NUMBERS:
        if f"{name}.{ours}" in found:
            values[theirs[f"{name}.{ours}"]] = _shortest(found, f"{name}.{ours}")
    values["num_hidden_layers"] = read_layers(header)
    values["num_attention_heads"], values["num_key_value_heads"] = read_counts(header)
    values.setdefault("vocab_size", _vocabulary(header))
    if window:
        values["sliding_window"] = window
    _set_head_size(found, name, values)
    if name in HYBRIDS:
        values["linear_value_head_dim"] = read_linear_heads(header).value_size
        theirs[f"{name}.{_INNER}"] = "linear_value_head_dim"
    scaling = _scaling(header, found, name, values)
    if scaling:
        values["rope_scaling"] = scaling
    names = {key: ours for ours, key in theirs.items() if ours in found}
    names |= {f"{each}_token_id": f"tokenizer.ggml.{each}_token_id" for each in ("bos", "eos")}
    return GgufConfig(values | _special_ids(found), names)


def read_counts(header: GgufHeader) -> tuple[int, int]:
    """(query heads, key heads), alike in every layer. Raises CheckpointError."""
    found = metadata(header)
    name = _architecture(found)
    query, key = (f"{name}.{field}" for field in _COUNTS)
    remedy = "layers with different numbers of heads are not supported"
    heads = found.same_integer(query, remedy)
    return heads, found.same_integer(key, remedy) if key in found else heads


def read_layers(header: GgufHeader) -> int:
    """Layers, without those that guess further tokens. Raises CheckpointError."""
    fields = metadata(header)
    name = _architecture(fields)
    layers = fields.integer(f"{name}.block_count")
    if name not in HYBRIDS:
        return layers
    return layers - fields.integer(f"{name}.{_GUESSING}", 0, low=0, high=layers - 1)


class LinearHeads(NamedTuple):
    """Heads of linear layers, and their sizes."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


def read_linear_heads(header: GgufHeader) -> LinearHeads:
    """The heads of a hybrid's linear layers. Raises CheckpointError for values that do not fit."""
    fields = metadata(header)
    name = _architecture(fields)
    size, keys, values = (
        fields.integer(f"{name}.ssm.{field}", high=_LARGEST_HEAD)
        for field in ("state_size", "group_count", "time_step_rank")
    )
    inner = fields.integer(f"{name}.{_INNER}")
    if inner % values:
        fields.refuse(f"{name}.{_INNER}", f"it must be a multiple of {values} value heads")
    if values % keys:
        fields.refuse(f"{name}.ssm.time_step_rank", f"it must be a multiple of {keys} key heads")
    return LinearHeads(keys, values, size, inner // values)


def _architecture(found: Fields) -> str:
    name = found.text(_ARCHITECTURE)
    if name not in _FAMILIES:
        found.refuse(_ARCHITECTURE, f"only {', '.join(_FAMILIES)} are supported")
    return name


def _check_fields(header: GgufHeader, found: Fields, name: str) -> None:
    """Refuse a setting of the model that is not known: it could change the arithmetic."""
    if found.integer("split.count", 1, low=0) > 1:
        found.refuse("split.count", "merge the parts with llama-gguf-split --merge")
    known = {*_SIZES, *_COUNTS, *_NUMBERS, *_ELSEWHERE}
    if name in HYBRIDS:
        known |= {*_OF_HYBRIDS[name], *_LINEAR_ELSEWHERE}
    for key in sorted(header.metadata):
        prefix, _, field = key.partition(".")
        if prefix == name and field not in known:
            found.refuse(key, "tpdet cannot tell whether it changes the arithmetic")
    for field in () if name in HYBRIDS and name != "qwen35" else _EXPERTS:
        if found.integer(f"{name}.{field}", 0, low=0):
            found.refuse(f"{name}.{field}", "models with experts are not supported")


def _set_head_size(found: Fields, name: str, values: dict[str, Any]) -> None:
    """Heads are rotated whole but in hybrids, and values have the size of keys."""
    key, heads = f"{name}.attention.key_length", values["num_attention_heads"]
    hidden = found.integer(f"{name}.embedding_length")
    if key not in found and hidden % heads:
        found.refuse(f"{name}.embedding_length", f"it must be a multiple of {heads} heads")
    size = found.integer(key, hidden // heads, high=_LARGEST_HEAD)
    values["head_dim"] = size
    rotated, of_values = _OF_HEADS
    if name in HYBRIDS:
        key = f"{name}.{rotated}"
        values["partial_rotary_factor"] = found.integer(key, size // 4, high=size) / size
    for field in (of_values,) if name in HYBRIDS else _OF_HEADS:
        if found.integer(f"{name}.{field}", size) != size:
            found.refuse(
                f"{name}.{field}",
                f"only heads of one size, here {size}, rotated whole, are supported",
            )


def _vocabulary(header: GgufHeader) -> int:
    entry = header.tensors.get("token_embd.weight")
    if entry is None:
        raise CheckpointError(f"{header.path.name}: tensor token_embd.weight is missing")
    return entry.shape[0]


def _scaling(
    header: GgufHeader, found: Fields, name: str, values: dict[str, Any]
) -> dict[str, Any]:
    """The object `rope_scaling`; {} for none."""
    of_kind, of_factor, of_original = (f"{name}.{key}" for key in _SCALING)
    kind = found.text(of_kind, "none")
    if kind not in ("none", "linear", "yarn"):
        found.refuse(of_kind, "only linear and yarn are supported")
    if ROTARY_FACTORS in header.tensors and kind != "none":
        found.refuse(of_kind, f"beside the factors of {ROTARY_FACTORS} it must be none")
    if ROTARY_FACTORS in header.tensors:
        return _llama3(header, values)
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": found.number(of_factor)}
    if kind == "yarn" and of_original in found:
        scaling["original_max_position_embeddings"] = found.integer(of_original)
    return scaling


def _llama3(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of which the factors come. Raises CheckpointError if there are none."""
    entry, size = header.tensors[ROTARY_FACTORS], values["head_dim"]
    about = f"{header.path.name}: tensor {entry.name}"
    if entry.kind != "F32" or entry.shape != (size // 2,):
        raise CheckpointError(
            f"{about} is {entry.kind} {list(entry.shape)}: heads of {size} have F32 [{size // 2}]"
        )
    with header.path.open("rb") as file:
        file.seek(entry.offset)
        factors = np.frombuffer(file.read(entry.size), np.float32)
    base, factor = float(values.get("rope_theta", 10000.0)), float(factors.max())
    with np.errstate(all="ignore"):  # what is not finite differs
        expected = _factors_of_llama3(base, size, factor)
        same = (abs(factors / expected - 1) <= _SAME).all()
    if not same:
        raise CheckpointError(
            f"{about} has other factors than the scaling of "
            f"Llama 3 (low {_LOW:g}, high {_HIGH:g}, of {_ORIGINAL} positions): not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _factors_of_llama3(base: float, size: int, factor: float) -> np.ndarray:
    """[size / 2], by frequency: none for short waves, all of it for long ones, a part between."""
    lengths = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = (_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / max(factor, 1.0) + smooth)
    expected = np.where(lengths < _ORIGINAL / _HIGH, 1.0, between)
    return np.where(lengths > _ORIGINAL / _LOW, factor, expected)


def _special_ids(found: Fields) -> dict[str, Any]:
    ids = {
        name: found.integer(f"tokenizer.ggml.{name}_token_id", low=0)
        for name in ("eos", "eot", "bos")
        if f"tokenizer.ggml.{name}_token_id" in found
    }
    ends = [ids[name] for name in ("eos", "eot") if name in ids]
    begin = {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    return {"eos_token_id": list(dict.fromkeys(ends)) or None} | begin


def _shortest(found: Fields, key: str) -> float:
    """The shortest decimal of a number that is stored in fp32: 1e-05, not 9.999999747378752e-06."""
    with np.errstate(all="ignore"):
        value = np.float32(found.number(key))
    if not np.isfinite(value) or value == 0:
        found.refuse(key, "it must be a number of fp32 above 0")
    return float(str(value))
