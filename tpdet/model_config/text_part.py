"""The text part of a checkpoint that can also read images: `text_config` of its `config.json`."""

from typing import Any

from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import INERT

_ENDING = "ForConditionalGeneration"
_ALIASES = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""The family of a text part whose `model_type` is not the family's name."""

_SHARED = frozenset("torch_dtype dtype eos_token_id bos_token_id quantization_config".split())
"""Keys that may stand outside or inside; where both do, they must agree."""

_TIED = "tie_word_embeddings"
_TIED_BY_EITHER = ("llava", "llava_next_video", "llava_onevision", "video_llama_3")
"""Models that are tied if one of both says so. In the others the value outside counts, for the head
belongs to the whole. Tensors of the files that contradict it are refused."""

_OF_IMAGES = frozenset(
    "vision_config image_token_id image_token_index video_token_id video_token_index "
    "vision_start_token_id vision_end_token_id vision_token_id vision_feature_layer "
    "vision_feature_layers vision_feature_select_strategy vision_aspect_ratio "
    "projector_hidden_act projector_layernorm_eps multimodal_projector_bias "
    "multimodal_projector_layernorm perceiver_config spatial_pool_mode spatial_pool_stride "
    "spatial_merge_size scale_factor image_seq_length video_seq_length image_grid_pinpoints "
    "use_image_newline_parameter ignore_index downsample_ratio _pad_token_id "
    "mm_tokens_per_image boi_token_index eoi_token_index".split()
)
_POSITIONS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images enter the rotary embedding; those of a text are alike in all sections."""


def text_part(values: dict[str, Any], file: str, architectures: dict[str, str]) -> dict[str, Any]:
    """The values of the text part, in the form of a text model's `config.json`.

    architectures: by `model_type`. Raises CheckpointError naming the key for an architecture, a
    text part or a key outside it that is not known.
    """
    outside = Fields(values, file)
    names = outside.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).endswith(_ENDING):
        outside.refuse("architectures", f"beside text_config one that ends in {_ENDING} is needed")
    known = _SHARED | _OF_IMAGES | INERT
    known |= {"architectures", "model_type", "text_config", _TIED}
    outside.only(known, "tpdet cannot tell whether it changes the text part")
    inner = outside.inner("text_config")
    assert inner is not None
    family = _ALIASES.get(inner.text("model_type"), inner.text("model_type"))
    if family not in architectures:
        inner.refuse("model_type", f"only {', '.join((*architectures, *_ALIASES))} are supported")
    found = dict(values["text_config"])
    for key in sorted(_SHARED):
        if key in outside:
            if key in inner and found[key] != values[key]:
                inner.refuse(key, f"outside text_config it is {values[key]!r:.60}, keep one")
            found[key] = values[key]
    if _TIED in outside:
        either = outside.raw("model_type") in _TIED_BY_EITHER
        found[_TIED] = outside.boolean(_TIED) or (either and inner.boolean(_TIED, False))
    found |= {"model_type": family, "architectures": [architectures[family]]}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), dict) and "mrope_section" in found[key]:
            found[key] = _of_a_text(found[key])
    return found


def _of_a_text(rotary: dict[str, Any]) -> dict[str, Any]:
    """The same rotary embedding for positions of a text, which all sections share."""
    rest = {key: value for key, value in rotary.items() if key not in _POSITIONS_OF_IMAGES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in rest.items()
    }
