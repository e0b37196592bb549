"""The text part of a checkpoint that can also read images: `text_config` of its `config.json`.

Checkpoints of transformers 4 may have the same keys without a `text_config` (`_FLAT`), keep a copy
of some beside it, or leave out what the class of the text part has by default (`text_defaults`).
"""

from typing import Any

from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.keys import INERT
from tpdet.checkpoint.model_config.text_defaults import completed

_ENDING = "ForConditionalGeneration"
_ALIASES = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""The family of a text part whose `model_type` is not the family's name."""

_TEXT_TYPES = {
    "llava": "llama", "llava_next": "llama", "llava_next_video": "llama",
    "llava_onevision": "qwen2", "video_llava": "llama", "vipllava": "llama",
    "mistral3": "mistral", "idefics2": "mistral", "idefics3": "llama", "smolvlm": "llama",
    "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text",
    "gemma3": "gemma3_text", "internvl": "qwen2", "got_ocr2": "qwen2", "lighton_ocr": "qwen3",
    "video_llama_3": "qwen2", "deepseek_vl": "llama", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""By `model_type` of the whole: that of a text part which names none."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Models whose text part may stand in the whole, or have its `model_type`."""

_SHARED = frozenset("torch_dtype dtype eos_token_id bos_token_id quantization_config".split())
"""Keys that may stand outside or inside, and count for both; the one outside counts first."""

_TIED = "tie_word_embeddings"
_TIED_BY_EITHER = (
    *("llava", "llava_next_video", "llava_onevision", "video_llama_3"),
    *("qwen2_vl", "qwen2_5_vl"),
)
"""Models that are tied if one of both says so. In the others the value outside counts, for the head
belongs to the whole. Tensors of the files that contradict it are refused."""

_OF_IMAGES = frozenset(
    "projector_hidden_act projector_layernorm_eps projector_config projector_pooling_ratio "
    "projection_dim multimodal_projector_bias multimodal_projector_layernorm perceiver_config "
    "spatial_pool_mode spatial_pool_stride spatial_patch_size spatial_merge_size scale_factor "
    "ignore_index downsample_ratio _pad_token_id boi_token_index boi_token_id eoi_token_index "
    "eoi_token_id use_image_newline_parameter use_reentrant_checkpointing use_token_compression "
    "patch_size qk_layer_norms_perceiver language_model_only".split()
)
_BEGINNINGS = ("image_", "video_", "vision_", "mm_")
"""Keys of images, by name and by how they begin: a text has no use for them."""
_POSITIONS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images enter the rotary embedding; those of a text are alike in all sections."""


def is_of_images(values: dict[str, Any]) -> bool:
    """Whether a `config.json` has a text model as a part."""
    return values.get("text_config") is not None or values.get("model_type") in [*_TEXT_TYPES]


def text_part(
    values: dict[str, Any], file: str, architectures: dict[str, str], keys: frozenset[str]
) -> dict[str, Any]:
    """The values of the text part, in the form of a text model's `config.json`.

    architectures: by `model_type`; keys: of text models, which count inside alone, as transformers
    has it. Raises CheckpointError naming the key for an architecture, a text part or a key outside
    it that is not known.
    """
    outside = Fields(values, file)
    whole = outside.text("model_type")
    if whole not in _TEXT_TYPES:
        outside.refuse(
            "model_type", f"beside a text_config only {', '.join(_TEXT_TYPES)} are known"
        )
    names = outside.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).endswith(_ENDING):
        outside.refuse("architectures", f"of {whole} one that ends in {_ENDING} is needed")
    outside = Fields(_without_images(values), file)
    outside.only(
        keys | _SHARED | INERT | {"text_config", _TIED},
        "tpdet cannot tell whether it changes the text part",
    )
    if "text_config" not in outside and whole not in _FLAT:
        outside.refuse("text_config", f"a complete config.json of {whole} has it")
    inner = outside.inner("text_config")
    if inner is None:
        stated = {key: value for key, value in values.items() if key in keys}
        inner = Fields(stated | {"model_type": _TEXT_TYPES[whole]}, file)
    else:
        stated = _without_images(values["text_config"])
    kind = inner.text("model_type", _TEXT_TYPES[whole])
    if kind == whole and kind in _FLAT:
        kind = _TEXT_TYPES[whole]
    family = _ALIASES.get(kind, kind)
    if family not in architectures:
        inner.refuse("model_type", f"only {', '.join((*architectures, *_ALIASES))} are supported")
    text = completed(kind, stated | _said_outside(outside, inner))
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _of_a_text(text[key])
    return text | {"model_type": family, "architectures": [architectures[family]]}


def _without_images(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if key not in _OF_IMAGES and not key.startswith(_BEGINNINGS)
    }


def _said_outside(outside: Fields, inner: Fields) -> dict[str, Any]:
    """What the whole says of its text part; null where that takes a key away."""
    shared = {key: outside.raw(key) for key in _SHARED if key in outside}
    for key, other in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        if key in shared and other not in shared:
            shared[other] = None
    if _TIED in outside:
        either = outside.raw("model_type") in _TIED_BY_EITHER and inner.boolean(_TIED, False)
        shared[_TIED] = outside.boolean(_TIED) or either
    return shared


def _of_a_text(rotary: dict[str, Any]) -> dict[str, Any]:
    """The same rotary embedding for positions of a text, which all sections share."""
    rest = {key: value for key, value in rotary.items() if key not in _POSITIONS_OF_IMAGES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in rest.items()
    }
