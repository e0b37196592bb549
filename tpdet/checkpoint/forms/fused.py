"""Tensors that a checkpoint has fused, as the parts that a model reads, without a copy."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tpdet.checkpoint.model_config.stored_form import FusedParts
from tpdet.errors import CheckpointError

Views = dict[str, Callable[[], Any]]


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


def split_fused(
    views: Views, holder: dict[str, str], fused: FusedParts
) -> tuple[Views, dict[str, str]]:
    """The tensors with parts in place of fused ones, and the file of each.

    Raises CheckpointError for a checkpoint that has a part and the fused tensor as well.
    """
    found, files = dict(views), dict(holder)
    for name in holder:
        ending = next((each for each in fused if name.endswith(f".{each}")), None)
        if ending is None:
            continue
        del found[name], files[name]
        first, total = 0, sum(rows for _, rows in fused[ending])
        for part, rows in fused[ending]:
            target = name.removesuffix(ending) + part
            if target in holder:
                raise CheckpointError(
                    f"{holder[target]}: tensor {target} is also a part of {name}: keep one of them"
                )
            about = f"{holder[name]}: tensor {name}"
            found[target] = partial(_rows, views[name], about, total, first, rows)
            files[target] = holder[name]
            first += rows
    return found, files


def _rows(stored: Callable[[], Any], about: str, total: int, first: int, rows: int) -> Rows:
    view = stored()
    shape = list(view.get_shape())
    if len(shape) != 2 or shape[0] != total:
        raise CheckpointError(f"{about} has shape {shape}, config.json asks for {total} rows")
    return Rows(view, first, rows)
