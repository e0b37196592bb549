"""Experts that a checkpoint stores in one tensor, as tensors of each expert, without a copy.

    experts.gate_up_proj, down_proj          [E, K, N]           K inputs, N outputs
    experts.*_bias                           [E, N]
    experts.*_blocks, experts.*_scales       [E, N, K / 32, 16], [E, N, K / 32]: MXFP4, uint8

Outputs of gate_up_proj are gates and ups in turn, one each (gpt-oss). Expert i's parts are named
`experts.i.gate_proj.weight` and so on; in MXFP4 `weight_packed` [N, K / 2] and `weight_scale`, the
names and the layout of a quantised matrix (`quantised_forms.py`).
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError


class _Ending(NamedTuple):
    """How a stacked tensor is named, and an expert's part of it; which dimension outputs are."""

    stored: str
    part: str
    dimensions: int
    outputs: int


_ENDINGS = (
    _Ending("", "weight", 3, 2),
    _Ending("_bias", "bias", 2, 1),
    _Ending("_blocks", "weight_packed", 4, 1),
    _Ending("_scales", "weight_scale", 3, 1),
)
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertPart:
    """Every `step`-th output, from `first` on, of one expert in a stacked tensor.

    It has the form of a safetensors slice: outputs [N], or a matrix [N, rest]. outputs: their
    dimension in the stored tensor. Nothing of it is read yet.
    """

    stored: Any
    expert: int
    outputs: int
    first: int
    step: int

    def get_shape(self) -> list[int]:
        """[N], or [N, everything else that an output has]."""
        _, *shape = self.stored.get_shape()
        count = shape.pop(self.outputs - 1) // self.step
        return [count, prod(shape)] if shape else [count]

    def get_dtype(self) -> str:
        """The stored dtype, as safetensors names it."""
        return str(self.stored.get_dtype())

    def __getitem__(self, where: Any) -> Any:
        """A part by slices of step 1: outputs, then what they have."""
        rows, *rest = where if isinstance(where, tuple) else (where,)
        first, last, _ = rows.indices(self.get_shape()[0])
        asked = [slice(None)] * self.outputs
        asked[0] = slice(self.expert, self.expert + 1)
        read = slice(first * self.step, last * self.step)
        found = self.stored[(*asked, read)][0].movedim(self.outputs - 1, 0)[self.first :: self.step]
        return found if found.dim() == 1 else found.flatten(1)[(slice(None), *rest)].contiguous()


def split_stacked(tensors: Tensors, experts: int) -> Tensors:
    """The tensors with those of `experts` experts in place of stacked ones.

    Raises CheckpointError for a checkpoint that has an expert's tensor and the stacked one as well.
    """
    split = dict(tensors)
    for name, tensor in tensors.items():
        kind = next(
            (
                (projection, ending)
                for projection in _PROJECTIONS
                for ending in _ENDINGS
                if name.endswith(f".experts.{projection}{ending.stored}")
            ),
            None,
        )
        if kind is None:
            continue
        projection, ending = kind
        del split[name]
        block = name.removesuffix(f".{projection}{ending.stored}")
        parts = _PROJECTIONS[projection]
        for expert in range(experts):
            for first, part in enumerate(parts):
                target = f"{block}.{expert}.{part}.{ending.part}"
                if target in tensors:
                    raise CheckpointError(
                        f"{tensors[target].file}: tensor {target} is also a part of {name}: keep "
                        "one"
                    )
                one = partial(_part, name, tensor, experts, expert, ending, first, len(parts))
                split[target] = CheckpointTensor(tensor.file, one)
    return split


def _part(
    name: str,
    tensor: CheckpointTensor,
    experts: int,
    expert: int,
    ending: _Ending,
    first: int,
    step: int,
) -> ExpertPart:
    view = tensor.open()
    shape = list(view.get_shape())
    if len(shape) != ending.dimensions or shape[0] != experts or shape[ending.outputs] % step:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} has shape {shape}, config.json asks for {experts} "
            "experts" + (", gates and ups in turn" if step > 1 else "")
        )
    return ExpertPart(view, expert, ending.outputs, first, step)
