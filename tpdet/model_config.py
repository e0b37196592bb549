"""A model's configuration, read from a Hugging Face `config.json`; what is not known is refused.

Llama 2/3, Mistral, Qwen2/2.5 and Qwen3, as transformers 4 and 5 write them. Every key is either
used, known to be inert, or refused by name: nothing is approximated.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpdet.errors import CheckpointError, NotFoundError
from tpdet.kernels.rotary_spec import RotarySpec

MAX_CONFIG_BYTES = 1 << 20
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Keys that reach no bit of an answer.
_INERT = frozenset(
    [
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)
# Keys that are served at one value only.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "hidden_dropout": (0, None),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "resid_pdrop": (0, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
_USED = frozenset(
    [
        "attention_bias",
        "dtype",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
    ]
)
_ROTARY_KEYS = {
    "default": frozenset({"rope_theta"}),
    "linear": frozenset({"rope_theta", "factor"}),
    "llama3": frozenset(
        {
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
    "yarn": frozenset(
        {
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """What fixes a decoder: sizes, rotary embedding, windows (None: none) a layer, end tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: RotarySpec
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def load_model_config(directory: Path, dtype: str = "auto") -> ModelConfig:
    """Read `config.json` (and end tokens from `generation_config.json`) of a directory.

    dtype "auto" takes the checkpoint's. Raises NotFoundError for a missing file and CheckpointError
    naming file, key, value and remedy.
    """
    keys = _Keys(directory / "config.json")
    architectures = keys.raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise keys.wrong("architectures", "name exactly one")
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise keys.wrong("architectures", f"supported are {', '.join(FAMILIES)}")
    _refuse_unknown(keys)
    layers = keys.positive("num_hidden_layers")
    heads = keys.positive("num_attention_heads")
    kv_heads = keys.positive("num_key_value_heads", heads if family == "llama" else None)
    if heads % kv_heads:
        raise keys.wrong("num_key_value_heads", f"it must divide {heads} attention heads")
    hidden = keys.positive("hidden_size")
    head_dim = keys.positive("head_dim", 128 if family == "qwen3" else hidden // heads)
    if head_dim not in HEAD_SIZES:
        raise keys.wrong("head_dim", f"head size {head_dim} is not one of {HEAD_SIZES}")
    if family != "qwen2" and keys.flag("attention_bias", False):
        raise keys.wrong("attention_bias", "only Qwen2's bias on q, k and v is supported")
    max_position = keys.positive("max_position_embeddings")
    eps = keys.number("rms_norm_eps", 1e-6)
    if not 0 < eps < 1:
        raise keys.wrong("rms_norm_eps", "use a number between 0 and 1")
    return ModelConfig(
        family=family,
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rotary=_rotary(keys, head_dim, max_position),
        max_position=max_position,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        windows=_windows(keys, family, layers),
        dtype=_dtype(keys, dtype),
        eos_token_ids=_eos_token_ids(directory, keys),
        bos_token_id=keys.optional_id("bos_token_id"),
    )


class _Keys:
    """A configuration file's keys, with refusals that name file, key and value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = read_json_object(path)

    def wrong(self, key: str, remedy: str) -> CheckpointError:
        """The error for a key whose value cannot be served."""
        shown = json.dumps(self.raw.get(key))[:80]
        return CheckpointError(f"{self.path.name}: {key} = {shown} is not supported: {remedy}")

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer; null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "use a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "use a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "use true or false")
        return value

    def optional_id(self, key: str) -> int | None:
        """A token id, or None."""
        value = self.raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(key, "use one token id or null")
        return value


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object of up to `limit` bytes: no duplicate keys, no NaN. Raises like the loader."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path} does not exist: give the directory of a Hugging Face model"
        ) from error
    if len(data) > limit:
        raise CheckpointError(f"{path.name} is over {limit} bytes: it is not a configuration")
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} does not hold a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_unknown(keys: _Keys) -> None:
    for key in sorted(keys.raw):
        if key in _ONLY:
            value = keys.raw[key]
            if not any(value == only and type(value) is not str for only in _ONLY[key]) and (
                value not in _ONLY[key]
            ):
                allowed = " or ".join(json.dumps(only) for only in _ONLY[key])
                raise keys.wrong(key, f"only {allowed} is")
        elif key not in _USED and key not in _INERT:
            raise keys.wrong(key, "this key is not known to tpdet, and is not guessed at")


def _rotary(keys: _Keys, head_dim: int, max_position: int) -> RotarySpec:
    """The rotary embedding, in either of the two styles of configuration."""
    name = "rope_parameters" if keys.raw.get("rope_parameters") is not None else "rope_scaling"
    given = keys.raw.get(name) or {}
    if not isinstance(given, dict):
        raise keys.wrong(name, "use an object")
    values = {"rope_theta": keys.raw.get("rope_theta") or 10000.0} | given
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] or ["default"]
    kind = kinds[0]
    if any(other != kind for other in kinds) or kind not in _ROTARY_KEYS:
        raise keys.wrong(name, f"rotary scaling must be one of {', '.join(_ROTARY_KEYS)}")
    for key in sorted(values):
        if key == "partial_rotary_factor" and values[key] == 1:
            continue
        if key not in _ROTARY_KEYS[kind]:
            raise keys.wrong(name, f"{key!r} is not a setting of {kind!r} scaling")
        value = values[key]
        if key == "truncate":
            if not isinstance(value, bool):
                raise keys.wrong(name, "'truncate' must be true or false")
        elif value is not None and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise keys.wrong(name, f"{key!r} must be a positive number")
    if kind != "default" and "factor" not in values:
        raise keys.wrong(name, f"{kind!r} scaling needs 'factor'")
    return RotarySpec(
        kind=kind,
        theta=float(values["rope_theta"]),
        dim=head_dim,
        factor=float(values.get("factor") or 1.0),
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        original_max_position=int(values.get("original_max_position_embeddings") or max_position),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=values.get("truncate", True),
    )


def _windows(keys: _Keys, family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as transformers applies it."""
    # transformers gives a Mistral configuration without the key its first model's window.
    window = keys.raw.get("sliding_window", 4096 if family == "mistral" else None)
    if window is not None:
        window = keys.positive("sliding_window", window)
    types = keys.raw.get("layer_types")
    if family in ("llama", "mistral"):
        if types is not None:
            raise keys.wrong("layer_types", f"{family} has layers of one kind")
        if family == "llama" and window is not None:
            raise keys.wrong("sliding_window", "llama has no sliding window")
        return (window,) * layers
    if not keys.flag("use_sliding_window", False):
        window = None
    if types is None:
        first = keys.raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise keys.wrong("max_window_layers", "use a number of layers")
        if window is None:
            first = layers
        return tuple(window if index >= first else None for index in range(layers))
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
        raise keys.wrong("layer_types", f"list full_attention or sliding_attention {layers} times")
    if window is None and "sliding_attention" in types:
        raise keys.wrong("layer_types", "sliding_attention needs use_sliding_window and a size")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(keys: _Keys, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    found = keys.raw.get("dtype") or keys.raw.get("torch_dtype") or "float32"
    if found not in DTYPES:
        key = "dtype" if keys.raw.get("dtype") else "torch_dtype"
        raise keys.wrong(key, f"use one of {', '.join(DTYPES)}, or name one with --dtype")
    return found


def _eos_token_ids(directory: Path, keys: _Keys) -> tuple[int, ...]:
    """End tokens: generation_config.json's, else config.json's; ascending."""
    source = keys
    if (directory / "generation_config.json").exists():
        generation = _Keys(directory / "generation_config.json")
        if generation.raw.get("eos_token_id") is not None:
            source = generation
    value = source.raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    size = keys.positive("vocab_size")
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < size for i in ids):
        raise source.wrong("eos_token_id", f"use ids in [0, {size}), one or a list of them")
    return tuple(sorted(dict.fromkeys(ids)))
