"""From a Hugging Face directory to a ModelConfig; what cannot be computed exactly is refused."""

from pathlib import Path
from typing import Any

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.model_config.families import FAMILIES, OTHER_HEADS, Family
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.keys import ALIASES, INERT, NEEDED, NEUTRAL, PARSED
from tpdet.checkpoint.model_config.model import DTYPES, HEAD_SIZES, ModelConfig
from tpdet.checkpoint.model_config.quantisation import parse_quantisation
from tpdet.checkpoint.model_config.rope import parse_rotary
from tpdet.checkpoint.model_config.text_part import is_of_images, text_part
from tpdet.errors import NotFoundError, UsageError

# Limits far above every model, so that no number of a file can fill a machine's memory.
MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14

_KEYS = PARSED.union(NEUTRAL, *(each.parsed.union(each.neutral) for each in FAMILIES.values()))
"""Keys of text models."""


def load_model_config(directory: str | Path, dtype: str = "auto") -> ModelConfig:
    """Parse `config.json`, and the EOS ids of `generation_config.json` if there is one.

    directory: a Hugging Face directory, or a GGUF file, which stands for a `config.json`.
    dtype: "float32", "bfloat16" or "float16" overrides the checkpoint's; "auto" keeps it.
    Raises NotFoundError for a missing directory or file, CheckpointError (file, key, value,
    remedy) for anything unknown or not supported, UsageError for an unknown `dtype`.
    """
    directory = Path(directory)
    config, family, _ = read_checked(directory)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = config.integer("vocab_size", high=MAX_VOCABULARY)
    heads, key_heads, head_dim = read_heads(config, family)
    max_position = config.integer("max_position_embeddings")
    kind = _dtype(config, dtype, family.dtype)
    scales = family.scales(config, head_dim, kind)
    rotary = parse_rotary(config, head_dim, max_position, family.rotary)
    return ModelConfig(
        family=family.name,
        **{name: getattr(family, name) for name in _OF_FAMILY},
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number(family.eps_key) * scales.eps,
        rotary=rotary.plain,
        max_position=rotary.context,
        tie_word_embeddings=config.boolean("tie_word_embeddings", family.tied),
        attention_bias=_switch(config, family, "attention_bias", family.attention_bias),
        qk_norm=_switch(config, family, "use_qk_norm", family.qk_norm),
        windows=family.windows(config, layers),
        dtype=kind,
        eos_token_ids=_eos_ids(directory, config, vocab_size),
        bos_token_id=_bos_id(config),
        window_rotary=rotary.window,
        rotary_layers=family.rotary_layers(config, layers),
        query_key_scale=scales.query_key,
        embedding_scale=scales.embedding,
        logit_scale=scales.logits,
        attention_cap=scales.attention_cap,
        logit_cap=scales.logit_cap,
        linear=family.linear(config, layers),
        mixture=family.mixture(config, layers),
        **_head(config, vocab_size),
    )


MOST_LABELS = 1 << 16


def _head(config: Fields, vocab_size: int) -> dict[str, Any]:
    """The fields of what reads the last norm's rows. Raises CheckpointError."""
    _, head = OTHER_HEADS.get(config.raw("architectures")[0], (None, "tokens"))
    if head != "labels":
        return {"head": head}
    if "pad_token_id" not in config:
        config.refuse(
            "pad_token_id",
            "a score head reads the last token that is no padding: state its id, also of a "
            "tokenizer that never pads",
        )
    named = config.raw("id2label")
    count = config.integer(
        "num_labels", len(named) if isinstance(named, dict) else 2, high=MOST_LABELS
    )
    padding = config.integer("pad_token_id", low=0, high=vocab_size - 1)
    return {"head": head, "labels": count, "pad_token_id": padding}


_OF_FAMILY = (
    *("architecture", "norm", "layer_norms", "qk_norm_over", "activation"),
    *("rotary_pairs", "row_bias", "sinks", "attention_gate"),
)
"""The fields that all checkpoints of a family share."""


def _bos_id(config: Fields) -> int | None:
    return config.integer("bos_token_id", low=0) if "bos_token_id" in config else None


def read_checked(directory: Path) -> tuple[Fields, Family, bool]:
    """(configuration, family, whether it is the text part of a model that also reads images).

    Every key is known and has the family's name, and what its checkpoints leave out is filled in.
    Raises as `load_model_config`.
    """
    config, values, of_images = _read_values(directory)
    parse_quantisation(config)
    family = _family(config)
    values = _in_own_names(config, values, family)
    config = config.holding(values)
    _check_keys(config, values, family)
    missing = {key: value for key, value in family.defaults.items() if key not in config}
    return config.holding(values | missing), family, of_images


def _in_own_names(config: Fields, values: dict[str, Any], family: Family) -> dict[str, Any]:
    """The values with each key of ALIASES under the name that the family has for it."""
    found = dict(values)
    for names in ALIASES:
        own = next((name for name in names if name in family.parsed), None)
        if own is None:
            continue
        for name in names:
            if name == own or name not in config:
                continue
            if found.get(own) is not None and found[own] != found[name]:
                config.refuse(name, f"{own} is {found[own]!r:.60}, keep one of them")
            found[own] = found.pop(name)
    return found


def _switch(config: Fields, family: Family, key: str, usual: bool) -> bool:
    """Whether a layer has a part: the family says so (`usual`), or leaves it to the key."""
    return config.boolean(key, usual) if key in family.parsed else usual


def _read_values(model: Path) -> tuple[Fields, dict[str, Any], bool]:
    """The configuration, its values, and whether the model can read images, too."""
    if is_gguf(model):
        from tpdet.checkpoint.gguf.config import read_gguf_config

        found = read_gguf_config(model)
        return Fields(found.values, str(model), names=found.names), found.values, False
    if not model.is_dir():
        raise NotFoundError(f"{model} is not a directory: give a Hugging Face model directory")
    path = model / "config.json"
    values = read_json_object(path)
    if not is_of_images(values):
        return Fields(values, str(path)), values, False
    architectures = {family.name: name for name, family in FAMILIES.items()}
    values = text_part(values, str(path), architectures, _KEYS)
    return Fields(values, str(path), "text_config"), values, True


def _family(config: Fields) -> Family:
    """Architecture and `model_type` must be known and agree."""
    names = config.raw("architectures")
    known = FAMILIES | {name: family for name, (family, _) in OTHER_HEADS.items()}
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(known):
        config.refuse("architectures", f"only one of {', '.join(known)} is supported")
    family = known[names[0]]
    if config.text("model_type") != family.name:
        config.refuse("model_type", f"{names[0]} goes with {family.name!r}")
    return family


def _check_keys(config: Fields, values: dict[str, Any], family: Family) -> None:
    neutral = NEUTRAL | {**family.neutral}
    parsed = PARSED | family.parsed
    for key in sorted(set(values) & set(neutral) - parsed):
        allowed, remedy = neutral[key]
        value = values[key]
        if value is not None and not any(_equal(value, other) for other in allowed):
            config.refuse(key, remedy)
    config.only(
        parsed | INERT | frozenset(neutral),
        "tpdet cannot tell whether it changes the arithmetic; remove it only if it does not",
        _needed(family),
    )


def _needed(family: Family) -> frozenset[str]:
    """The keys without which nothing can be said of a model of the family."""
    heads = {"num_key_value_heads"} if family.key_heads_required else set()
    found = NEEDED | family.needed | heads | {family.eps_key}
    return found - {*family.defaults}


def _equal(value: object, other: object) -> bool:
    """Equality by which false differs from 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def read_heads(config: Fields, family: Family) -> tuple[int, int, int]:
    """(query heads, key heads, head size). Raises CheckpointError."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    key_heads = config.integer("num_key_value_heads", None if family.key_heads_required else heads)
    if key_heads > heads or heads % key_heads:
        config.refuse("num_key_value_heads", f"it must divide num_attention_heads {heads}")
    default = family.head_dim
    if "head_dim" not in config and default is None:
        hidden = config.integer("hidden_size")
        if hidden % heads:
            config.refuse("hidden_size", f"without head_dim it must be a multiple of {heads} heads")
        default = hidden // heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2 or head_dim > max(HEAD_SIZES):
        known = f"only even sizes up to {max(HEAD_SIZES)} are supported"
        if "head_dim" in config:
            config.refuse("head_dim", known)
        config.refuse("hidden_size", f"it makes heads of {head_dim}, {known}")
    return heads, key_heads, head_dim


def _dtype(config: Fields, wanted: str, unnamed: str) -> str:
    """The dtype `wanted`, or the checkpoint's for "auto"; `unnamed` if it names none, unless ""."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"dtype {wanted!r} is not supported: use auto, {', '.join(DTYPES)}")
        return wanted
    key = "dtype" if "dtype" in config else "torch_dtype"
    if key not in config and unnamed:
        return unnamed
    if key not in config:
        config.refuse("dtype", "the checkpoint names none, choose one with --dtype")
    if "torch_dtype" in config and config.text("torch_dtype") != config.text(key):
        config.refuse("torch_dtype", f"dtype says {config.text(key)!r}, choose one with --dtype")
    if config.text(key) not in DTYPES:
        config.refuse(key, f"only {', '.join(DTYPES)} are supported, choose one with --dtype")
    return config.text(key)


def _eos_ids(directory: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json's, else config.json's; () if neither has."""
    source = config
    path = directory / "generation_config.json"
    if path.exists():
        generation = Fields(read_json_object(path), str(path))
        source = generation if "eos_token_id" in generation else config
    value = source.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            source.refuse("eos_token_id", f"ids must be integers in [0, {vocab_size})")
    return tuple(dict.fromkeys(ids))
