"""Tensors that a checkpoint has fused, as the parts that a model reads, without a copy."""

from functools import partial
from typing import Any

from tpdet.checkpoint.model_config.stored_form import FusedParts
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix


class Rows:
    """Neighbouring rows [first, first + rows) of a stored matrix, nothing of which is read yet."""

    def __init__(self, stored: Any, first: int, rows: int) -> None:
        self._stored, self._first, self._rows = stored, first, rows

    def get_shape(self) -> list[int]:
        """The shape of these rows."""
        return [self._rows, *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        """The stored dtype, as safetensors names it."""
        return str(self._stored.get_dtype())

    def __getitem__(self, where: Any) -> Any:
        """A part of them; where: a slice for each dimension up to the one that is cut."""
        rows, *rest = where if isinstance(where, tuple) else (where,)
        first, last, _ = rows.indices(self._rows)
        return self._stored[(slice(self._first + first, self._first + last), *rest)]

    def packed(self, rows: range, columns: range) -> PackedMatrix:
        """A part of them as codes and scales, of a quantised matrix."""
        first = self._first
        part: PackedMatrix = self._stored.packed(
            range(first + rows.start, first + rows.stop), columns
        )
        return part


def split_fused(tensors: Tensors, fused: FusedParts) -> Tensors:
    """The tensors with parts in place of fused ones.

    Raises CheckpointError for a checkpoint that has a part and the fused tensor as well.
    """
    split = dict(tensors)
    for name, tensor in tensors.items():
        ending = next((ending for ending in fused if name.endswith(f".{ending}")), None)
        if ending is None:
            continue
        del split[name]
        first, total = 0, sum(rows for _, rows in fused[ending])
        for part, rows in fused[ending]:
            target = name.removesuffix(ending) + part
            if target in tensors:
                raise CheckpointError(
                    f"{tensors[target].file}: tensor {target} is also a part of {name}: keep one "
                    "of them"
                )
            rows_of_part = partial(_rows, name, tensor, total, first, rows)
            split[target] = CheckpointTensor(
                tensor.file, rows_of_part, rule=tensor.rule, form=tensor.form
            )
            first += rows
    return split


def _rows(name: str, tensor: CheckpointTensor, total: int, first: int, rows: int) -> Rows:
    view = tensor.open()
    shape = list(view.get_shape())
    if len(shape) != 2 or shape[0] != total:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} has shape {shape}, config.json asks for {total} rows"
        )
    return Rows(view, first, rows)
