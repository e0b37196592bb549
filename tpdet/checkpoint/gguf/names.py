"""The tensors of a GGUF file by their Hugging Face names.

llama.cpp's converter reorders the rows of q and k in files of architecture "llama" (Llama and
Mistral): a head's rows i and D/2 + i, which the rotary embedding turns together, become neighbours.
"""

import re
from dataclasses import dataclass

from tpdet.checkpoint.gguf.config import REORDERING, ROTARY_FACTORS, read_counts
from tpdet.checkpoint.gguf.header import GgufHeader, TensorEntry
from tpdet.errors import CheckpointError

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file; heads: those whose rows were reordered, 0 if the rows are in order."""

    entry: TensorEntry
    heads: int


def named_tensors(header: GgufHeader) -> dict[str, NamedTensor]:
    """The file's tensors by Hugging Face name. Raises CheckpointError for an unknown one."""
    query, key = read_counts(header)
    reordered = header.metadata.get("general.architecture") in REORDERING
    heads = {"attn_q": query, "attn_k": key} if reordered else {}
    found = {}
    for stored, entry in header.tensors.items():
        if stored == ROTARY_FACTORS:
            continue
        name, of = _hugging_face_name(stored)
        if name is None:
            raise CheckpointError(
                f"{header.path.name}: tensor {stored} has no place in this model: it is not known"
            )
        count = heads.get(of, 0)
        if count and entry.shape[0] % (2 * count):
            raise CheckpointError(
                f"{header.path.name}: tensor {stored} has {entry.shape[0]} rows, which are not "
                f"{count} heads of an even size"
            )
        found[name] = NamedTensor(entry, count)
    return found


def _hugging_face_name(stored: str) -> tuple[str | None, str]:
    """(name or None, the tensor's part of the stored name)."""
    stem, _, kind = stored.rpartition(".")
    if kind not in ("weight", "bias"):
        return None, stem
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}", stem
    match = _LAYER.fullmatch(stem)
    if match is None or match[2] not in _IN_LAYER:
        return None, stem
    return f"model.layers.{int(match[1])}.{_IN_LAYER[match[2]]}.{kind}", match[2]
