"""The tensors of the text part of a checkpoint that can also read images, by their usual names."""

from tpdet.checkpoint.stored import Tensors
from tpdet.errors import CheckpointError

# Transformers 5, transformers 4; the first that fits counts.
_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
_PARTS_FOR_IMAGES = (
    "vision_tower.", "vision_model.", "vision_encoder.", "vision_projection.", "visual.",
    "image_tower.", "video_tower.", "multi_modal_projector.", "connector.", "projector.",
    "aligner.", "mlp1.", "image_newline",
)  # fmt: skip
_OF_IMAGES = (*_PARTS_FOR_IMAGES, *(f"model.{part}" for part in _PARTS_FOR_IMAGES))
"""Beginnings of the names of tensors that only an image needs."""


def text_tensors(tensors: Tensors) -> Tensors:
    """The tensors by the names of a text model. Those of images are left out.

    Any other tensor keeps its name, so that it is refused as one without a place. Raises
    CheckpointError for two tensors of one name.
    """
    names: dict[str, str] = {}
    for name in tensors:
        if name.startswith(_OF_IMAGES):
            continue
        usual = _text_name(name)
        if usual in names:
            raise CheckpointError(f"tensors {names[usual]} and {name} are both {usual}: keep one")
        names[usual] = name
    return {usual: tensors[name].renamed(usual) for usual, name in names.items()}


def _text_name(name: str) -> str:
    for prefix, usual in _PREFIXES:
        if name.startswith(prefix):
            return usual + name.removeprefix(prefix)
    return name
