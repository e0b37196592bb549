"""The tensors that a model reads, out of those that a checkpoint or a trainer has; no copies."""

from tpdet.checkpoint.forms.fused import split_fused
from tpdet.checkpoint.forms.quantised import dequantised
from tpdet.checkpoint.forms.stacked import split_stacked
from tpdet.checkpoint.model_config.stored_form import StoredForm
from tpdet.checkpoint.stored import Tensors
from tpdet.errors import CheckpointError

_EMBEDDING, _HEADS = "embed_tokens.weight", ("lm_head.", "score.")


def in_parts(tensors: Tensors, form: StoredForm) -> Tensors:
    """The tensors of the text part by the names that a model reads, fused and stacked ones split.

    Raises CheckpointError for a tensor that is there twice, whole and in parts, and for parts of a
    quantised matrix that do not fit.
    """
    if form.text_part:
        tensors = text_tensors(tensors)
    if _EMBEDDING in tensors:  # saved from the model below the head
        tensors = {
            name: tensor.renamed(name)
            for old, tensor in tensors.items()
            for name in [old if old.startswith(_HEADS) else f"model.{old}"]
        }
    if form.stacked is not None:
        tensors = split_stacked(tensors, form.stacked)
    if form.quantisation is not None:
        tensors = dequantised(tensors, form.quantisation)
    return split_fused(tensors, form.fused) if form.fused else tensors


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
