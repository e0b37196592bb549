"""How the tensors of a directory are stored: the text part of more, quantised, or neither."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tpdet.checkpoint.model_config.families import Family
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.load import read_checked, read_heads
from tpdet.checkpoint.model_config.mixtures import no_experts
from tpdet.checkpoint.model_config.quantisation import Quantisations, parse_quantisation

FusedParts = Mapping[str, tuple[tuple[str, int], ...]]


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

    fused: by the ending of a fused tensor's name, the endings of its parts and the rows of each.
    stacked: how the experts of a layer are one tensor, where they are; None for a dense model.
    """

    text_part: bool = False
    quantisation: Quantisations | None = None
    fused: FusedParts = field(default_factory=dict)
    stacked: "StackedExperts | None" = None


def read_stored_form(directory: Path) -> StoredForm:
    """What `config.json` says of it; neither without such a file. Raises CheckpointError."""
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
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    if "qkv" in family.fused:
        rows = heads * size, key_heads * size, key_heads * size
        parts = (f"self_attn.{part}_proj.weight" for part in "qkv")
        found["self_attn.qkv_proj.weight"] = tuple(zip(parts, rows, strict=True))
    if "gate_up" in family.fused:
        names = "mlp.gate_proj.weight", "mlp.up_proj.weight"
        found["mlp.gate_up_proj.weight"] = tuple((name, width) for name in names)
    return found
