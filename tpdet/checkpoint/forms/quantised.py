"""Weights that are stored quantised, as tensors of numbers: dequantised as they are read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tpdet.checkpoint.forms.quantised_forms import FORMS, Form, Range, Stored
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.errors import CheckpointError

_Where = slice | tuple[slice, ...]


class QuantisedFile:
    """The tensors of a checkpoint, quantised ones as matrices, in the form of a safetensors handle.

    Raises CheckpointError for a part that is missing, or of another shape or dtype than the rest.
    """

    def __init__(
        self, views: Mapping[str, Callable[[], Any]], holder: Mapping[str, str], form: Quantisation
    ) -> None:
        """views: what opens each stored tensor; holder: the file of each."""
        self._views, self._form = views, form
        self._kind = FORMS[form.kind]
        self._stems: dict[str, Stored] = {}
        self._plain = dict.fromkeys(views)
        for name in views:
            stem = name.removesuffix(self._kind.marker)
            if stem == name or not self._is_quantised(name):
                continue
            suffixes = (self._kind.marker, *self._kind.parts(form))
            more = [each for each in self._kind.may_have if f"{stem}{each}" in views]
            for suffix in suffixes:
                if f"{stem}{suffix}" not in views:
                    raise CheckpointError(
                        f"{holder[name]}: tensor {stem}{suffix} is missing, though {name} is there"
                    )
            if len(views[name]().get_shape()) != 2:
                raise CheckpointError(f"{holder[name]}: tensor {name} is no matrix")
            if f"{stem}.weight" in views and self._kind.marker != ".weight":
                raise CheckpointError(
                    f"{holder[f'{stem}.weight']}: tensor {stem}.weight is stored as {name}, too: "
                    "keep one of them"
                )
            parts = {suffix: views[f"{stem}{suffix}"]() for suffix in (*suffixes, *more)}
            self._stems[f"{stem}.weight"] = Stored(stem, holder[name], parts, form)
            for suffix in parts:
                del self._plain[f"{stem}{suffix}"]

    def keys(self) -> Iterator[str]:
        """Names of the tensors, as a checkpoint that is not quantised has them."""
        yield from self._plain
        yield from self._stems

    def get_slice(self, name: str) -> Any:
        """A tensor, nothing of which is read yet."""
        if name in self._stems:
            return QuantisedTensor(self._stems[name], self._kind)
        return self._views[name]()

    def rules(self) -> dict[str, str]:
        """The name of the rule of each quantised tensor."""
        return dict.fromkeys(self._stems, self._form.rule)

    def file_of(self, name: str, holder: Mapping[str, str]) -> str:
        """The file that holds a tensor, for messages."""
        return self._stems[name].file if name in self._stems else holder[name]

    def _is_quantised(self, name: str) -> bool:
        """Whether a tensor with the marker is; a plain ".weight" may be in another dtype."""
        return self._kind.marker != ".weight" or self._views[name]().get_dtype() == "F8_E4M3"


class QuantisedTensor:
    """One quantised matrix, in the form of a safetensors slice of fp32."""

    def __init__(self, stored: Stored, kind: Form) -> None:
        self._stored, self._kind = stored, kind
        self._shape = kind.shape(stored)

    def get_shape(self) -> list[int]:
        """[rows, columns]"""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype of what is read."""
        return "F32"

    def __getitem__(self, where: _Where) -> torch.Tensor:
        """Rows and columns by slices of step 1."""
        parts = where if isinstance(where, tuple) else (where,)
        parts = (*parts, *[slice(None)] * (2 - len(parts)))
        wanted, read = [], []
        units = self._kind.units(self._stored.form, self._shape[1])
        for part, extent, unit in zip(parts, self._shape, units, strict=True):
            first, last, _ = part.indices(extent)
            whole = Range(first, last).by(unit).times(unit)
            read.append(Range(whole.first, min(whole.last, extent)))
            wanted.append(slice(first - whole.first, last - whole.first))
        return self._kind.values(self._stored, *read)[wanted[0], wanted[1]]
