"""How the tensors of a directory are stored: the text part of more, quantised, or neither."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.model_config.families import Family
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.linear_layers import no_linear
from tpdet.checkpoint.model_config.load import read_checked, read_heads
from tpdet.checkpoint.model_config.mixtures import no_experts
from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.checkpoint.model_config.quantisation import Quantisations, parse_quantisation

_LINEAR, _ATTENTION = "linear_attn", "self_attn"
_OF_HYBRIDS = "gated_q", "linear_qkvz", "linear_ba", "linear_qkv", "linear_convolution"


class FusedTensor(NamedTuple):
    """The parts of a fused tensor: endings of their names, and the rows of each in a group.

    Groups of rows follow each other, and in a group its rows of each part.
    """

    parts: tuple[tuple[str, int], ...]
    groups: int = 1

    @property
    def group_rows(self) -> int:
        """Rows of a group, of all parts."""
        return sum(rows for _, rows in self.parts)


FusedParts = Mapping[str, FusedTensor]


class StackedExperts(NamedTuple):
    """All experts of a layer in one tensor, as a checkpoint may have them, or transformers' module.

    in_turn: gates and ups stand in turn, and inputs before outputs (gpt-oss's checkpoints); else
    ups stand behind all gates, and outputs before inputs (transformers, whose checkpoints of these
    families have the tensors of each expert). block, projections: as `Mixture`; transformers calls
    the block "mlp" and the stacked projections gate_up_proj and down_proj, whatever these are.
    """

    experts: int
    block: str
    projections: tuple[str, str, str]
    in_turn: bool


@dataclass(frozen=True)
class StoredForm:
    """text_part: whether there are tensors of images, too; quantisation: None if there is none.

    fused: by the ending of a fused tensor's name, what is in it.
    stacked: how the experts of a layer are one tensor, where they are; None for a dense model.
    """

    text_part: bool = False
    quantisation: Quantisations | None = None
    fused: FusedParts = field(default_factory=dict)
    stacked: "StackedExperts | None" = None


def read_stored_form(directory: Path) -> StoredForm:
    """What `config.json` says of it; neither without such a file. Raises CheckpointError.

    directory: or a GGUF file, whose fused tensors are those of any writer.
    """
    if is_gguf(directory):
        config, family, _ = read_checked(directory)
        stacked = _stacked(config, family)
        if family.linear is no_linear:
            return StoredForm(stacked=stacked)
        return StoredForm(fused=_fused(config, replace(family, fused=_OF_HYBRIDS)), stacked=stacked)
    if not (directory / "config.json").exists():
        return StoredForm()
    config, family, of_images = read_checked(directory)
    fused, stacked = _fused(config, family), _stacked(config, family)
    return StoredForm(of_images, parse_quantisation(config), fused, stacked)


def _stacked(config: Fields, family: Family) -> StackedExperts | None:
    """How a family's experts are stacked where they are; None for one without experts."""
    if family.mixture is no_experts:
        return None
    mixture = family.mixture(config, config.integer("num_hidden_layers"))
    if mixture is None:
        return None
    return StackedExperts(
        mixture.routing.experts, mixture.block, mixture.projections, family.stacked
    )


def _fused(config: Fields, family: Family) -> FusedParts:
    """The parts of a family's fused tensors; none for a family that fuses nothing."""
    if not family.fused:
        return {}
    heads, key_heads, size = read_heads(config, family)
    width = config.integer("intermediate_size")
    rows = heads * size, key_heads * size, key_heads * size
    qkv = (f"{_ATTENTION}.{part}_proj.weight" for part in "qkv")
    gated = (f"{_ATTENTION}.{part}_proj.weight" for part in ("q", "gate"))
    known = {
        "qkv": ("self_attn.qkv_proj.weight", FusedTensor(tuple(zip(qkv, rows, strict=True)))),
        "gate_up": (
            "mlp.gate_up_proj.weight",
            FusedTensor((("mlp.gate_proj.weight", width), ("mlp.up_proj.weight", width))),
        ),
        "gated_q": (
            f"{_ATTENTION}.q_proj.weight",
            FusedTensor(tuple((name, size) for name in gated), heads),
        ),
    } | _linear(family.linear(config, config.integer("num_hidden_layers")))
    return dict(known[name] for name in family.fused if name in known)


def _linear(linear: LinearAttention | None) -> dict[str, tuple[str, FusedTensor]]:
    """The fused tensors of linear layers; Qwen3-Next's have the rows of a key head together."""
    if linear is None:
        return {}
    each = linear.values_of_a_key
    rows = linear.key_size, linear.key_size, each * linear.value_size
    whole = tuple(linear.key_heads * count for count in rows)
    inner = tuple(
        (f"{_LINEAR}.in_proj_{part}.weight", n) for part, n in zip("qkv", rows, strict=True)
    )
    return {
        "linear_qkvz": (
            f"{_LINEAR}.in_proj_qkvz.weight",
            FusedTensor((*inner, (f"{_LINEAR}.in_proj_z.weight", rows[2])), linear.key_heads),
        ),
        "linear_ba": (
            f"{_LINEAR}.in_proj_ba.weight",
            FusedTensor(
                tuple((f"{_LINEAR}.in_proj_{part}.weight", each) for part in "ba"), linear.key_heads
            ),
        ),
        "linear_qkv": (
            f"{_LINEAR}.in_proj_qkv.weight",
            FusedTensor(tuple((name, n) for (name, _), n in zip(inner, whole, strict=True))),
        ),
        "linear_convolution": (
            f"{_LINEAR}.conv1d.weight",
            FusedTensor(
                tuple(
                    (f"{_LINEAR}.{part}_conv1d.weight", n)
                    for part, n in zip("qkv", whole, strict=True)
                )
            ),
        ),
    }
