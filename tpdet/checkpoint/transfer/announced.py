"""What a sender says of tensors before their bytes come."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from tpdet.errors import CheckpointError

FILE = "the update"
"""Where tensors come from, in messages."""
MOST_TENSORS = 1 << 17
_MOST_DIMENSIONS = 8
_DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16),
           "float16": ("F16", torch.float16)}  # fmt: skip
"""By the name that senders use: the name in safetensors, and torch's dtype."""
_STORED = {dtype: stored for stored, dtype in _DTYPES.values()}


class AnnouncedTensor(NamedTuple):
    """A whole tensor that is to arrive: its name, dtype and shape as in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize


class ArrivedTensor:
    """An announced tensor in the form of a safetensors slice; its values come later."""

    def __init__(self, tensor: AnnouncedTensor) -> None:
        self._tensor = tensor
        self.values: torch.Tensor | None = None

    def get_shape(self) -> list[int]:
        """Its shape, known before its values."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its dtype, as safetensors names it."""
        return _STORED[self._tensor.dtype]

    def __getitem__(self, where: Any) -> torch.Tensor:
        """A part of its values, without a copy. Raises CheckpointError before they came."""
        if self.values is None:
            raise CheckpointError(f"{FILE}: tensor {self._tensor.name} did not arrive yet")
        return self.values[where]


def announced(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[AnnouncedTensor]:
    """The tensors of three equally long lists, in the order in which their bytes follow.

    Raises CheckpointError naming the tensor and the value that cannot be.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise CheckpointError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: give one of each "
            "for every tensor"
        )
    if len(names) > MOST_TENSORS:
        raise CheckpointError(f"{len(names)} tensors in one call, the limit is {MOST_TENSORS}")
    tensors = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        short = dtype.removeprefix("torch.")
        if short not in _DTYPES:
            raise CheckpointError(
                f"{FILE}: tensor {name} has dtype {dtype}: send {', '.join(_DTYPES)}"
            )
        if not 0 < len(shape) <= _MOST_DIMENSIONS or min(shape) < 1:
            raise CheckpointError(
                f"{FILE}: tensor {name} has shape {list(shape)}: 1 to {_MOST_DIMENSIONS} extents "
                "of 1 and more are possible"
            )
        tensors.append(AnnouncedTensor(name, _DTYPES[short][1], tuple(shape)))
    return tensors
