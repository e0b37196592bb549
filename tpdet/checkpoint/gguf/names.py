"""The tensors of a GGUF file by their Hugging Face names, and what llama.cpp's converter changed.

- llama (Llama and Mistral): a head's rows i and D/2 + i of q and k, which the rotary embedding
  turns together, are neighbours.
- qwen35, qwen35moe: the value heads of a linear layer, which Hugging Face has by key head, stand in
  turn: the first of each key head, the second of each, and so on. In rows of in_proj_qkv (behind
  its queries and keys), in_proj_z, in_proj_a, in_proj_b and of the convolution, in columns of
  out_proj, in A_log and dt_bias.
- these and qwen3next: norms are stored as 1 + w, but for that of linear layers; A_log as
  -exp(A_log); experts as one tensor a projection.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np
import torch

from tpdet.checkpoint.gguf import config
from tpdet.checkpoint.gguf.header import GgufHeader, TensorEntry
from tpdet.errors import CheckpointError

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_PROJECTIONS = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj", "q_norm": "q_norm",
    "k_norm": "k_norm",
}  # fmt: skip
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    **{
        f"attn_{ours}.{kind}": f"self_attn.{theirs}.{kind}"
        for kind in ("weight", "bias")
        for ours, theirs in _PROJECTIONS.items()
    },
}
_DENSE = {
    f"ffn_{part}.{kind}": f"mlp.{part}_proj.{kind}"
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
_IN_LAYER = _ATTENTION | _DENSE | {"ffn_norm.weight": "post_attention_layernorm.weight"}
_LINEAR = {
    "attn_qkv.weight": "in_proj_qkv.weight", "attn_gate.weight": "in_proj_z.weight",
    "ssm_in.weight": "in_proj_qkvz.weight", "ssm_ba.weight": "in_proj_ba.weight",
    "ssm_beta.weight": "in_proj_b.weight", "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_conv1d.weight": "conv1d.weight", "ssm_a": "A_log", "ssm_dt.bias": "dt_bias",
    "ssm_norm.weight": "norm.weight", "ssm_out.weight": "out_proj.weight",
}  # fmt: skip
_IN_HYBRID = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    **{ours: f"linear_attn.{theirs}" for ours, theirs in _LINEAR.items()},
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    **{f"ffn_{part}_exps.weight": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    **{
        f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}
_OUTSIDE = {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in _ENDS.items()
    for kind in ("weight", "bias")
}
_PLUS_ONE = re.compile(r"(attn_norm|post_attention_norm|attn_[qk]_norm|output_norm)\.weight")
_BEHIND_KEYS = "attn_qkv.weight", "ssm_conv1d.weight"
_OF_VALUES = *_BEHIND_KEYS, "attn_gate.weight", "ssm_out.weight"
_OF_HEADS = "ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"
"""What of a linear layer has values of value heads, and what has one number for each."""
_DIGITS = Context(prec=40)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file, and how the model's values come from those that are stored.

    shape: the model's; rows and columns: where each of the model's is stored, None where they are
    in order; undo: what is done to the values then.
    """

    entry: TensorEntry
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None


def named_tensors(header: GgufHeader) -> dict[str, NamedTensor]:
    """The file's tensors by Hugging Face name. Raises CheckpointError for an unknown one."""
    architecture = header.metadata.get("general.architecture")
    hybrid, layers = architecture in config.HYBRIDS, config.read_layers(header)
    linear = config.read_linear_heads(header) if hybrid else None
    known = _IN_HYBRID if hybrid else _IN_LAYER
    tensors: dict[str, NamedTensor] = {}
    for stored, entry in header.tensors.items():
        match = _LAYER.fullmatch(stored)
        if stored == config.ROTARY_FACTORS or (hybrid and match and int(match[1]) >= layers):
            continue  # layers that guess further tokens stand behind the others
        name = _OUTSIDE.get(stored) if match is None else known.get(match[2])
        if name is None:
            raise CheckpointError(
                f"{header.path.name}: tensor {stored} has no place in this model: it is not known"
            )
        of = stored if match is None else match[2]
        named = NamedTensor(entry, entry.shape)
        if architecture in config.REORDERING:
            named = _of_pairs(header, of, entry)
        elif linear is not None:
            named = _of_hybrid(header, of, entry, linear, architecture in config.TILED)
        tensors[name if match is None else f"model.layers.{int(match[1])}.{name}"] = named
    return tensors


def _of_pairs(header: GgufHeader, of: str, entry: TensorEntry) -> NamedTensor:
    """A tensor of llama: heads of pairs back to heads of halves."""
    query, key = config.read_counts(header)
    heads = {"attn_q": query, "attn_k": key}.get(of.partition(".")[0])
    if heads is None:
        return NamedTensor(entry, entry.shape)
    if entry.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{header.path.name}: tensor {entry.name} has {entry.shape[0]} rows, which are not "
            f"{heads} heads of an even size"
        )
    order = np.arange(entry.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if len(entry.shape) == 1:
        return NamedTensor(entry, entry.shape, columns=order)
    return NamedTensor(entry, entry.shape, rows=order)


def _of_hybrid(
    header: GgufHeader, of: str, entry: TensorEntry, linear: config.LinearHeads, tiled: bool
) -> NamedTensor:
    """A tensor of a hybrid. Raises CheckpointError for a size that is not that of its heads."""
    shape = entry.shape
    if of == "ssm_conv1d.weight" and len(shape) == 2:
        shape = shape[0], 1, shape[1]
    elif of == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        shape = 1, *shape
    undo = _log_of_negative if of == "ssm_a" else _less_one if _PLUS_ONE.fullmatch(of) else None
    named = NamedTensor(entry, shape, undo=undo)
    of_values = linear.value_heads * linear.value_size
    sizes = dict.fromkeys(_OF_VALUES, of_values) | dict.fromkeys(_OF_HEADS, linear.value_heads)
    if not tiled or of not in sizes or linear.value_heads == linear.key_heads:
        return named
    by_columns = of == "ssm_out.weight" or len(shape) == 1
    extent, size = shape[-1] if by_columns else shape[0], sizes[of]
    keys = 2 * linear.key_heads * linear.key_size if of in _BEHIND_KEYS else 0
    if extent != keys + size:
        raise CheckpointError(
            f"{header.path.name}: tensor {entry.name} has shape {list(entry.shape)}: "
            f"{linear.key_heads} and {linear.value_heads} heads have {keys + size} there"
        )
    by_key = np.arange(size).reshape(linear.value_heads // linear.key_heads, linear.key_heads, -1)
    order = np.concatenate([np.arange(keys), keys + by_key.swapaxes(0, 1).reshape(-1)])
    if by_columns:
        return NamedTensor(entry, shape, columns=order, undo=undo)
    return NamedTensor(entry, shape, rows=order, undo=undo)


def _less_one(stored: torch.Tensor) -> torch.Tensor:
    """1 + w -> w, in fp32."""
    return stored.float() - 1.0


def _log_of_negative(stored: torch.Tensor) -> torch.Tensor:
    """-exp(x) -> x in fp32, by 40 digits and so the same on every machine.

    What is not below 0 becomes NaN, which is refused by the tensor's name.
    """
    values = [
        float(Decimal(-value).ln(_DIGITS)) if -float("inf") < value < 0 else float("nan")
        for value in stored.double().flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).float().reshape(stored.shape)
