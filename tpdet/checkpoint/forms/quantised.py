"""Weights that are stored quantised, as tensors of numbers: dequantised as they are read."""

from functools import partial

import torch

from tpdet.checkpoint.forms.quantised_forms import FORMS, Form, Span, StoredMatrix
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError

_Where = slice | tuple[slice, ...]


def dequantised(tensors: Tensors, form: Quantisation) -> Tensors:
    """The tensors with matrices of numbers in place of quantised ones.

    Raises CheckpointError for a part that is missing, or of another shape or dtype than the rest.
    """
    kind = FORMS[form.kind]
    matrices: Tensors = {}
    plain = {name: CheckpointTensor(tensor.file, tensor.open) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        stem = name.removesuffix(kind.marker)
        if stem == name or not _is_quantised(tensor, kind):
            continue
        suffixes = (kind.marker, *kind.parts(form))
        for suffix in suffixes:
            if f"{stem}{suffix}" not in tensors:
                raise CheckpointError(
                    f"{tensor.file}: tensor {stem}{suffix} is missing, though {name} is there"
                )
        if len(tensor.open().get_shape()) != 2:
            raise CheckpointError(f"{tensor.file}: tensor {name} is no matrix")
        weight = f"{stem}.weight"
        if weight in tensors and kind.marker != ".weight":
            raise CheckpointError(
                f"{tensors[weight].file}: tensor {weight} is stored as {name}, too: keep one of "
                "them"
            )
        more = [suffix for suffix in kind.may_have if f"{stem}{suffix}" in tensors]
        parts = {suffix: tensors[f"{stem}{suffix}"].open() for suffix in (*suffixes, *more)}
        stored = StoredMatrix(stem, tensor.file, parts, form)
        view = partial(QuantisedTensor, stored, kind)
        matrices[weight] = CheckpointTensor(tensor.file, view, rule=form.rule)
        for suffix in parts:
            del plain[f"{stem}{suffix}"]
    return plain | matrices


def _is_quantised(tensor: CheckpointTensor, kind: Form) -> bool:
    """Whether a tensor with the marker is; a plain ".weight" may be in another dtype."""
    return kind.marker != ".weight" or tensor.open().get_dtype() == "F8_E4M3"


class QuantisedTensor:
    """One quantised matrix, in the form of a safetensors slice of fp32."""

    def __init__(self, stored: StoredMatrix, kind: Form) -> None:
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
            whole = Span(first, last).by(unit).times(unit)
            read.append(Span(whole.first, min(whole.last, extent)))
            wanted.append(slice(first - whole.first, last - whole.first))
        return self._kind.values(self._stored, *read)[wanted[0], wanted[1]]
