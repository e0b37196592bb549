"""Tensors that a checkpoint has fused, as the parts that a model reads, without a copy."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tpdet.checkpoint.model_config.stored_form import FusedParts, FusedTensor
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix, join_rows


class Rows:
    """The rows [first, first + width) of each `step` rows of a stored tensor, not read yet."""

    def __init__(self, stored: Any, first: int, width: int, step: int) -> None:
        self._stored, self._first, self._width, self._step = stored, first, width, step

    def get_shape(self) -> list[int]:
        """The shape of these rows."""
        rows, *rest = self._stored.get_shape()
        return [rows // self._step * self._width, *rest]

    def get_dtype(self) -> str:
        """The stored dtype, as safetensors names it."""
        return str(self._stored.get_dtype())

    def __getitem__(self, where: Any) -> Any:
        """A part of them; where: a slice for each dimension up to the one that is cut."""
        rows, *rest = where if isinstance(where, tuple) else (where,)
        first, last, _ = rows.indices(self.get_shape()[0])
        parts = [self._stored[(span, *rest)] for span in self._spans(first, last)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def packed(self, rows: range, columns: range) -> PackedMatrix:
        """A part of them as codes and scales, of a quantised matrix."""
        spans = self._spans(rows.start, rows.stop)
        parts = [self._stored.packed(range(span.start, span.stop), columns) for span in spans]
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def _spans(self, first: int, last: int) -> Iterator[slice]:
        """Where the rows [first, last) of these are stored: neighbours of each group."""
        while True:
            group, within = divmod(first, self._width)
            count = min(self._width - within, last - first)
            begin = group * self._step + self._first + within
            yield slice(begin, begin + count)
            first += count
            if first >= last:
                return


def split_fused(tensors: Tensors, fused: FusedParts) -> Tensors:
    """The tensors, parts in place of fused ones. Raises CheckpointError where both are stored."""
    split = dict(tensors)
    for name, tensor in tensors.items():
        ending = next((ending for ending in fused if name.endswith(f".{ending}")), None)
        if ending is None:
            continue
        del split[name]
        first = 0
        for part, rows in fused[ending].parts:
            target = name.removesuffix(ending) + part
            if target in tensors and target != name:
                raise CheckpointError(
                    f"{tensors[target].file}: tensor {target} is also a part of {name}: keep one "
                    "of them"
                )
            rows_of_part = partial(_rows, name, tensor, fused[ending], first, rows)
            split[target] = CheckpointTensor(
                tensor.file, rows_of_part, rule=tensor.rule, form=tensor.form
            )
            first += rows
    return split


def _rows(name: str, tensor: CheckpointTensor, fused: FusedTensor, first: int, rows: int) -> Rows:
    view = tensor.open()
    shape, total = list(view.get_shape()), fused.groups * fused.group_rows
    if len(shape) < 2 or shape[0] != total:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} has shape {shape}, config.json asks for {total} rows"
        )
    return Rows(view, first, rows, fused.group_rows)
