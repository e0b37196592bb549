"""Weights that are stored quantised, as tensors of numbers: dequantised as they are read."""

from functools import partial

import torch

from tpdet.checkpoint.forms.quantised_forms import FORMS, Form, Span, StoredMatrix
from tpdet.checkpoint.model_config.quantisation import Quantisation, Quantisations
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix

_Where = slice | tuple[slice, ...]
_ZERO_POINT = ".weight_zero_point"


def dequantised(tensors: Tensors, said: Quantisations) -> Tensors:
    """The tensors with matrices of numbers in place of quantised ones.

    Raises CheckpointError for a part that is missing, or of another shape or dtype than the rest,
    and for a matrix of a module that the checkpoint says is not quantised.
    """
    matrices: Tensors = {}
    plain = {name: CheckpointTensor(tensor.file, tensor.open) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        stems = {
            form: name.removesuffix(FORMS[form.kind].marker)
            for form in said.forms
            if name.endswith(FORMS[form.kind].marker) and _is_quantised(tensor, FORMS[form.kind])
        }
        if not stems:
            continue
        stem = next(iter(stems.values()))
        if stem in said.ignored:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is quantised, though quantization_config says that "
                f"{stem} is not"
            )
        stored = _matrix(tensors, stem, [*stems])
        view = partial(QuantisedTensor, stored)
        matrices[f"{stem}.weight"] = CheckpointTensor(
            tensor.file, view, rule=stored.form.rule, form=stored.form
        )
        for suffix in stored.parts:
            del plain[f"{stem}{suffix}"]
    return plain | matrices


def _is_quantised(tensor: CheckpointTensor, kind: Form) -> bool:
    """Whether a tensor with the marker is; a plain ".weight" may be in another dtype."""
    return kind.marker != ".weight" or tensor.open().get_dtype() == "F8_E4M3"


def _matrix(tensors: Tensors, stem: str, forms: list[Quantisation]) -> StoredMatrix:
    """A quantised matrix in the one of `forms` in which it is stored. Raises CheckpointError."""
    if len(forms) == 1:
        return _stored(tensors, stem, forms[0])
    fitting, refusals = [], []
    for form in forms:
        try:
            stored = _stored(tensors, stem, form)
            FORMS[form.kind].shape(stored)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            fitting.append(stored)
    if not fitting:
        raise CheckpointError(
            f"tensor {stem} has none of the forms of quantization_config: {'; '.join(refusals)}"
        )
    if len(fitting) > 1:
        raise CheckpointError(
            f"{fitting[0].file}: tensor {stem} may be {' or '.join(s.form.rule for s in fitting)}: "
            "tpdet cannot tell which"
        )
    return fitting[0]


def _stored(tensors: Tensors, stem: str, form: Quantisation) -> StoredMatrix:
    """The parts of a matrix in this form. Raises CheckpointError for one that is missing."""
    kind = FORMS[form.kind]
    name, suffixes = f"{stem}{kind.marker}", (kind.marker, *kind.parts(form))
    file = tensors[name].file
    for suffix in suffixes:
        if f"{stem}{suffix}" not in tensors:
            raise CheckpointError(
                f"{file}: tensor {stem}{suffix} is missing, though {name} is there"
            )
    if f"{stem}{_ZERO_POINT}" in tensors and _ZERO_POINT not in suffixes:
        raise CheckpointError(
            f"{file}: tensor {stem}{_ZERO_POINT} is there, though {form.rule} has no zero points"
        )
    if len(tensors[name].open().get_shape()) != 2:
        raise CheckpointError(f"{file}: tensor {name} is no matrix")
    weight = f"{stem}.weight"
    if weight in tensors and kind.marker != ".weight":
        raise CheckpointError(
            f"{tensors[weight].file}: tensor {weight} is stored as {name}, too: keep one of them"
        )
    more = [suffix for suffix in kind.may_have if f"{stem}{suffix}" in tensors]
    parts = {suffix: tensors[f"{stem}{suffix}"].open() for suffix in (*suffixes, *more)}
    return StoredMatrix(stem, file, parts, form)


class QuantisedTensor:
    """One quantised matrix, in the form of a safetensors slice of fp32."""

    def __init__(self, stored: StoredMatrix) -> None:
        self._stored, self._kind = stored, FORMS[stored.form.kind]
        self._shape = self._kind.shape(stored)

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
        spans = [
            range(*part.indices(extent)) for part, extent in zip(parts, self._shape, strict=True)
        ]
        return self.packed(*spans).numbers()

    def packed(self, rows: range, columns: range) -> PackedMatrix:
        """A part of it as codes and scales; maybe of more than the part."""
        read, cuts = [], []
        units = self._kind.units(self._stored.form, self._shape[1])
        for part, extent, unit in zip((rows, columns), self._shape, units, strict=True):
            whole = Span(part.start, max(part.start, part.stop)).by(unit).times(unit)
            read.append(Span(whole.first, min(whole.last, extent)))
            cuts.append(range(part.start - whole.first, part.stop - whole.first))
        codes = self._kind.codes(self._stored, *read)
        return codes.cut(slice(cuts[0].start, cuts[0].stop), cuts[1])
