"""Experts that are stored or sent in one tensor, as tensors of each expert, without a copy.

gpt-oss's checkpoints:

    experts.gate_up_proj, down_proj          [E, K, N]           K inputs, N outputs
    experts.*_bias                           [E, N]
    experts.*_blocks, experts.*_scales       [E, N, K / 32, 16], [E, N, K / 32]: MXFP4, uint8

Outputs of gate_up_proj are gates and ups in turn, one each. Modules of transformers, for all other
families; their outputs of gate_up_proj are all gates, then all ups. GGUF files have the same, or
both apart:

    experts.gate_up_proj, down_proj          [E, N, K]
    experts.gate_proj, up_proj, down_proj    [E, N, K]

Expert i's parts are named
`experts.i.gate_proj.weight` and so on; in MXFP4 `weight_packed` [N, K / 2] and `weight_scale`, the
names and the layout of a quantised matrix (`quantised_forms.py`).
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tpdet.checkpoint.model_config.stored_form import StackedExperts
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError


class _Ending(NamedTuple):
    """How a stacked tensor is named, and an expert's part of it; which dimension outputs are."""

    stored: str
    part: str
    dimensions: int
    outputs: int


_IN_TURN = (
    _Ending("", "weight", 3, 2),
    _Ending("_bias", "bias", 2, 1),
    _Ending("_blocks", "weight_packed", 4, 1),
    _Ending("_scales", "weight_scale", 3, 1),
)
_IN_HALVES = (_Ending("", "weight", 3, 1),)
_BLOCK = ".mlp."


@dataclass(frozen=True)
class ExpertPart:
    """One of `parts` projections of one expert in a stacked tensor: the `number`-th.

    It has the form of a safetensors slice: outputs [N], or a matrix [N, rest]. outputs: their
    dimension in the stored tensor. in_turn: whether outputs of the projections stand in turn, or
    those of one behind all of another. Nothing of it is read yet.
    """

    stored: Any
    expert: int
    outputs: int
    number: int
    parts: int
    in_turn: bool

    def get_shape(self) -> list[int]:
        """[N], or [N, everything else that an output has]."""
        _, *shape = self.stored.get_shape()
        count = shape.pop(self.outputs - 1) // self.parts
        return [count, prod(shape)] if shape else [count]

    def get_dtype(self) -> str:
        """The stored dtype, as safetensors names it."""
        return str(self.stored.get_dtype())

    def __getitem__(self, where: Any) -> Any:
        """A part by slices of step 1: outputs, then what they have."""
        rows, *rest = where if isinstance(where, tuple) else (where,)
        count = self.get_shape()[0]
        first, last, _ = rows.indices(count)
        asked = [slice(None)] * self.outputs
        asked[0] = slice(self.expert, self.expert + 1)
        begin, step, number = self.number * count, 1, 0
        if self.in_turn:
            begin, step, number = 0, self.parts, self.number
        read = slice(begin + first * step, begin + last * step)
        values = self.stored[(*asked, read)][0].movedim(self.outputs - 1, 0)[number::step]
        return values if values.dim() == 1 else values.flatten(1)[(slice(None), *rest)].contiguous()


def split_stacked(tensors: Tensors, stacked: StackedExperts) -> Tensors:
    """The tensors with those of each expert in place of stacked ones.

    A block that transformers renames has its name in checkpoints. Raises CheckpointError for an
    expert's tensor that is there by itself and in the stacked one as well.
    """
    if stacked.block != "mlp":
        tensors = _by_block(tensors, f".{stacked.block}.")
    if not any(".experts." in name and _kind(name, stacked) for name in tensors):
        return tensors
    split = dict(tensors)
    for name, tensor in tensors.items():
        kind = _kind(name, stacked)
        if kind is None:
            continue
        projection, ending = kind
        del split[name]
        block = name.removesuffix(f".{projection}{ending.stored}")
        parts = _parts_of(stacked)[projection]
        for expert in range(stacked.experts):
            for number, part in enumerate(parts):
                target = f"{block}.{expert}.{part}.{ending.part}"
                if target in tensors:
                    raise CheckpointError(
                        f"{tensors[target].file}: tensor {target} is also a part of {name}: keep "
                        "one"
                    )
                one = partial(_part, name, tensor, stacked, expert, ending, number, len(parts))
                split[target] = CheckpointTensor(tensor.file, one, rule=tensor.rule)
    return split


def _part(
    name: str,
    tensor: CheckpointTensor,
    stacked: StackedExperts,
    expert: int,
    ending: _Ending,
    number: int,
    parts: int,
) -> ExpertPart:
    view = tensor.open()
    shape, experts = list(view.get_shape()), stacked.experts
    if len(shape) != ending.dimensions or shape[0] != experts or shape[ending.outputs] % parts:
        order = ", gates and ups in turn" if stacked.in_turn else ", all gates, then all ups"
        raise CheckpointError(
            f"{tensor.file}: tensor {name} has shape {shape}, config.json asks for {experts} "
            "experts" + (order if parts > 1 else "")
        )
    return ExpertPart(view, expert, ending.outputs, number, parts, stacked.in_turn)


def _parts_of(stacked: StackedExperts) -> dict[str, tuple[str, ...]]:
    """The projections of an expert that a stacked tensor of this name holds."""
    gate, up, down = stacked.projections
    alone = {"gate_proj": (gate,), "up_proj": (up,), "down_proj": (down,)}
    return alone | {"gate_up_proj": (gate, up)}


def _kind(name: str, stacked: StackedExperts) -> tuple[str, _Ending] | None:
    """What a tensor stacks, and how; None for one that is not stacked."""
    for projection in _parts_of(stacked):
        for ending in _IN_TURN if stacked.in_turn else _IN_HALVES:
            if name.endswith(f".experts.{projection}{ending.stored}"):
                return projection, ending
    return None


def _by_block(tensors: Tensors, block: str) -> Tensors:
    """The tensors with the block's name in checkpoints in place of transformers'."""
    if not any(_BLOCK in name for name in tensors):
        return tensors
    named: Tensors = {}
    for name, tensor in tensors.items():
        usual = name.replace(_BLOCK, block)
        if usual in named:
            raise CheckpointError(f"{tensor.file}: tensor {usual} is there twice: keep one")
        named[usual] = tensor.renamed(usual)
    return named
