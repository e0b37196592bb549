"""The forms in which weights are stored quantised, and where the codes and scales of each lie.

`PackedMatrix` has the rule by which they become numbers; docs/checkpoints.md describes the layouts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix, pack

_BLOCK = 128  # of fp8, in both directions
_PER_INT32 = {4: 8, 8: 4}
_NOT_A_NUMBER = 255  # of MXFP4's scales, which are powers of two


@dataclass(frozen=True)
class Span:
    """Elements [first, last) along one dimension."""

    first: int
    last: int

    def by(self, unit: int) -> "Span":
        """The groups of `unit` elements that hold them."""
        return Span(self.first // unit, -(-self.last // unit))

    def times(self, unit: int) -> "Span":
        """The elements of these groups."""
        return Span(self.first * unit, self.last * unit)

    @property
    def cut(self) -> slice:
        """As an index."""
        return slice(self.first, self.last)


@dataclass(frozen=True)
class StoredMatrix:
    """The tensors that one quantised matrix is stored as, by suffix; `name` is the matrix's."""

    name: str
    file: str
    parts: Mapping[str, Any]
    form: Quantisation

    def read(self, suffix: str, rows: Span, columns: Span) -> torch.Tensor:
        """A cut of a part."""
        part: torch.Tensor = self.parts[suffix][rows.cut, columns.cut]
        return part

    def scales(self, suffix: str, rows: Span, columns: Span) -> torch.Tensor:
        """A cut of a part that holds scales, as stored. Refuses zero, NaN and infinity."""
        scales = self.read(suffix, rows, columns)
        if not (torch.isfinite(scales).all() and (scales != 0).all()):
            raise CheckpointError(
                f"{self.file}: tensor {self.name}{suffix} holds a scale of zero, NaN or infinity"
            )
        return scales

    def extent(self, suffix: str, dim: int) -> int:
        """The stored extent of a part."""
        return int(self.parts[suffix].get_shape()[dim])

    def check(self, suffix: str, *shape: int, dtypes: tuple[str, ...]) -> None:
        """Refuse (CheckpointError) a part of another shape or dtype."""
        view = self.parts[suffix]
        found, dtype = tuple(view.get_shape()), view.get_dtype()
        if found != shape or dtype not in dtypes:
            raise CheckpointError(
                f"{self.file}: tensor {self.name}{suffix} is {dtype} {list(found)}: "
                f"{self.form.rule} has {' or '.join(dtypes)} {list(shape)}"
            )

    def groups(self, columns: int) -> int:
        """The number of groups along K. Refuses groups that do not fill it, and a K of 0."""
        size = self.form.group or max(1, columns)
        if columns < 1 or columns % size:
            raise CheckpointError(
                f"{self.file}: tensor {self.name}: {columns} columns are no groups of {size}"
            )
        return columns // size


@dataclass(frozen=True)
class Form:
    """How one kind is stored.

    marker: the suffix that shows it; parts: all suffixes that are needed; shape: of the matrix,
    after its parts were checked; codes: a cut of the matrix [rows, columns], for ranges that begin
    and end at multiples of `units`, or at the matrix's end.
    """

    marker: str
    parts: Callable[[Quantisation], tuple[str, ...]]
    shape: Callable[[StoredMatrix], tuple[int, int]]
    units: Callable[[Quantisation, int], tuple[int, int]]
    codes: Callable[[StoredMatrix, Span, Span], PackedMatrix]
    may_have: tuple[str, ...] = ()


_SCALES = ("F32", "BF16", "F16")


def _fp8_shape(
    stored: StoredMatrix, groups: Callable[[int, int], tuple[int, int]]
) -> tuple[int, int]:
    rows, columns = stored.extent(".weight", 0), stored.extent(".weight", 1)
    stored.check(stored.form.scale, *groups(rows, columns), dtypes=_SCALES)
    return rows, columns


def _fp8_block_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    codes = stored.read(".weight", rows, columns).view(torch.uint8)
    scales = stored.scales(stored.form.scale, rows.by(_BLOCK), columns.by(_BLOCK))
    scale_rows = (torch.arange(len(codes)) // _BLOCK).int()
    return PackedMatrix(
        "e4m3", 8, codes, range(codes.shape[1]), scales, _BLOCK, scale_rows=scale_rows
    )


def _fp8_channel_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    codes = stored.read(".weight", rows, columns).view(torch.uint8)
    scales = stored.scales(stored.form.scale, rows, Span(0, 1))
    return PackedMatrix("e4m3", 8, codes, range(codes.shape[1]), scales, 0)


def _packed_shape(stored: StoredMatrix) -> tuple[int, int]:
    each = _PER_INT32[stored.form.bits]
    stored.check(".weight_shape", 2, dtypes=("I64", "I32"))
    rows, columns = map(int, stored.parts[".weight_shape"][:])
    stored.check(".weight_packed", rows, -(-columns // each), dtypes=("I32",))
    groups = stored.groups(columns)
    stored.check(".weight_scale", rows, groups, dtypes=_SCALES)
    if stored.form.zero_points:
        stored.check(".weight_zero_point", -(-rows // each), groups, dtypes=("I32",))
    return rows, columns


def _packed_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    bits, group = stored.form.bits, stored.form.group
    each = _PER_INT32[bits]
    codes = stored.read(".weight_packed", rows, columns.by(each)).contiguous().view(torch.uint8)
    of_groups = columns.by(group) if group else Span(0, 1)
    scales = stored.scales(".weight_scale", rows, of_groups)
    zeros, zero = None, 1 << (bits - 1)
    if stored.form.zero_points:
        packed = stored.read(".weight_zero_point", rows.by(each), of_groups)
        zeros, zero = pack(unpack(packed, bits, 0)[: len(scales)], bits), 0
    kept = range(columns.last - columns.first)
    return PackedMatrix("int", bits, codes, kept, scales, group, zeros=zeros, zero=zero)


def _mxfp4_shape(stored: StoredMatrix) -> tuple[int, int]:
    rows, half = stored.extent(".weight_packed", 0), stored.extent(".weight_packed", 1)
    stored.check(".weight_packed", rows, half, dtypes=("U8",))
    stored.check(".weight_scale", rows, stored.groups(2 * half), dtypes=("U8",))
    return rows, 2 * half


def _mxfp4_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    codes, group = stored.read(".weight_packed", rows, columns.by(2)), stored.form.group
    exponents = stored.read(".weight_scale", rows, columns.by(group))
    if (exponents == _NOT_A_NUMBER).any():
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name}.weight_scale holds a scale of NaN"
        )
    return PackedMatrix("e2m1", 4, codes, range(2 * codes.shape[1]), exponents, group)


def _transposed_shape(stored: StoredMatrix, packed_along: int) -> tuple[int, int]:
    """The shape in AWQ (packed along N, dimension 1) and GPTQ (K, dimension 0): stored [K, N]."""
    each = _PER_INT32[stored.form.bits]
    extents = [stored.extent(".qweight", 0), stored.extent(".qweight", 1)]
    stored.check(".qweight", *extents, dtypes=("I32",))
    extents[packed_along] *= each
    columns, rows = extents
    groups = stored.groups(columns)
    stored.check(".scales", groups, rows, dtypes=_SCALES)
    stored.check(".qzeros", groups, -(-rows // each), dtypes=("I32",))
    if ".g_idx" in stored.parts:
        stored.check(".g_idx", columns, dtypes=("I32", "I64"))
        in_order = torch.arange(columns) // (stored.form.group or columns)
        if not torch.equal(stored.parts[".g_idx"][:].long(), in_order):
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name}.g_idx has columns in another order: "
                "checkpoints made with desc_act are not supported"
            )
    return rows, columns


def _awq_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    packed = stored.read(".qweight", columns, rows.by(8))
    return _transposed(stored, unpack(packed, 4, 1, AWQ_ORDER), rows, columns, AWQ_ORDER)


def _gptq_codes(stored: StoredMatrix, rows: Span, columns: Span) -> PackedMatrix:
    packed = stored.read(".qweight", columns.by(8), rows)
    return _transposed(stored, unpack(packed, 4, 0), rows, columns, None)


def _transposed(
    stored: StoredMatrix,
    codes_KN: torch.Tensor,
    rows: Span,
    columns: Span,
    order: tuple[int, ...] | None,
) -> PackedMatrix:
    group, zero = stored.form.group, stored.form.zero_offset
    of_groups = columns.by(group) if group else Span(0, 1)
    zeros = unpack(stored.read(".qzeros", of_groups, rows.by(8)), 4, 1, order)
    scales = stored.scales(".scales", of_groups, rows).T.contiguous()
    codes = pack(codes_KN.T, 4)
    kept = range(columns.last - columns.first)
    return PackedMatrix(
        "int", 4, codes, kept, scales, group, zeros=pack(zeros.T[: len(codes)], 4), zero=zero
    )


FORMS = {
    "fp8 block": Form(
        ".weight",
        lambda form: (form.scale,),
        lambda stored: _fp8_shape(stored, lambda n, k: (-(-n // _BLOCK), -(-k // _BLOCK))),
        lambda form, columns: (_BLOCK, _BLOCK),
        _fp8_block_codes,
    ),
    "fp8 channel": Form(
        ".weight",
        lambda form: (form.scale,),
        lambda stored: _fp8_shape(stored, lambda n, k: (n, 1)),
        lambda form, columns: (1, 1),
        _fp8_channel_codes,
    ),
    "packed int": Form(
        ".weight_packed",
        lambda form: (
            (".weight_scale", ".weight_shape")
            + ((".weight_zero_point",) if form.zero_points else ())
        ),
        _packed_shape,
        lambda form, columns: (8, form.group or columns),
        _packed_codes,
    ),
    "mxfp4": Form(
        ".weight_packed",
        lambda form: (".weight_scale",),
        _mxfp4_shape,
        lambda form, columns: (1, form.group),
        _mxfp4_codes,
    ),
    "awq": Form(
        ".qweight",
        lambda form: (".qzeros", ".scales"),
        lambda stored: _transposed_shape(stored, 1),
        lambda form, columns: (8, form.group or columns),
        _awq_codes,
    ),
    "gptq": Form(
        ".qweight",
        lambda form: (".qzeros", ".scales"),
        lambda stored: _transposed_shape(stored, 0),
        lambda form, columns: (8, form.group or columns),
        _gptq_codes,
        may_have=(".g_idx",),
    ),
}
"""By `Quantisation.kind`."""


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The value that each nibble of AWQ's int32 holds, from the lowest nibble on."""


def unpack(
    packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """int32 [A, B] -> unsigned values as int32, 32 / bits times as many along `dim`.

    The lowest bits hold the first value, or value `order[0]` of each int32.
    """
    each = 32 // bits
    places = [0] * each
    for nibble, value in enumerate(order or range(each)):
        places[value] = nibble * bits
    shifts = torch.tensor(places, dtype=torch.int32)
    values = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1)
