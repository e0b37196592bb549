"""The tensors that a model reads, out of those that a checkpoint or a trainer has; no copies."""

from tpdet.checkpoint.forms.fused import split_fused
from tpdet.checkpoint.forms.quantised import dequantised
from tpdet.checkpoint.forms.stacked import split_stacked
from tpdet.checkpoint.forms.text_part import text_tensors
from tpdet.checkpoint.model_config.stored_form import StoredForm
from tpdet.checkpoint.stored import Tensors

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
