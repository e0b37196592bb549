"""From packed matrices to `OrderedWeight`, on a GPU; and which ones no kernel reads."""

from collections.abc import Iterator, Sequence

import torch

from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    INT8,
    UNIT,
    OrderedWeight,
    ordered_codes,
)
from tpdet.kernels.inputs.packed import PackedMatrix, unpack_bytes

WHOLE_GROUP = 128
"""Columns of a group where one scale is a whole row's: it is repeated."""
_SCALE_ROWS = 8  # rows that share a scale of blocks: gates and ups lie by eights
_GROUPS = (32, 64, 128)
_AT_ONCE = 1 << 26  # codes that are ordered together
_SYMMETRIC = {4: 8, 8: 128}  # the zero point of so many bits, where it is one for all
_INT4 = {torch.bfloat16: INT4, torch.float16: INT4_OF_HALF}
_INT4_ZERO = {torch.bfloat16: INT4_ZERO, torch.float16: INT4_ZERO_OF_HALF}


def refusal(matrix: PackedMatrix, widths: Sequence[int]) -> str:
    """Why no kernel reads a matrix whose chains are so wide; empty if one does."""
    if matrix.dtype != torch.bfloat16:
        return f"a model in {str(matrix.dtype).removeprefix('torch.')}"
    if _recipe(matrix) is None:
        scales = str(matrix.scales.dtype).removeprefix("torch.")
        zeros = "" if matrix.zeros is None else " and zero points"
        return f"{matrix.bits}-bit {matrix.kind} with scales in {scales}{zeros}"
    if matrix.group and matrix.group not in _GROUPS:
        return f"groups of {matrix.group} columns"
    least = max(UNIT, matrix.group or WHOLE_GROUP)
    odd = [width for width in widths if width % least or width < 2 * UNIT]
    return f"chains of {odd[0]} columns, no multiple of {least}" if odd else ""


def _recipe(matrix: PackedMatrix) -> int | None:
    if matrix.kind != "int":
        return E4M3 if matrix.kind == "e4m3" else E2M1
    if matrix.zeros is None:
        if matrix.zero != _SYMMETRIC[matrix.bits]:
            return None
        return INT8 if matrix.bits == 8 else _INT4.get(matrix.scales.dtype)
    return _INT4_ZERO.get(matrix.scales.dtype) if matrix.bits == 4 else None


def ordered_weight(matrices: Sequence[PackedMatrix]) -> OrderedWeight:
    """Leaves [N, K] of one matrix, on their device. Raises ValueError for what no kernel reads."""
    first = matrices[0]
    (n, k), recipe, why = first.shape, _recipe(first), refusal(first, [first.shape[1]])
    if why or recipe is None:
        raise ValueError(f"no kernel reads {why}")
    scales, zeros = [], []
    for matrix in matrices:
        begin = matrix.lead + matrix.columns.start
        if matrix.shape != (n, k) or (matrix.group and begin % matrix.group):
            raise ValueError(f"a leaf {matrix.shape} that begins inside a group")
        scales.append(_by_row(matrix, matrix.scales))
        if matrix.zeros is not None:
            zeros.append(_by_row(matrix, matrix.zero_codes() + matrix.zero))
    rows = _SCALE_ROWS if all(map(_by_eights, matrices)) else 1
    return OrderedWeight(
        recipe,
        first.bits,
        torch.cat([*_ordered_codes(matrices)]),
        torch.stack([of_leaf[::rows].T for of_leaf in scales]).contiguous(),
        first.group or WHOLE_GROUP,
        rows,
        (len(matrices), n, k),
        torch.stack([of_leaf.T for of_leaf in zeros]).contiguous() if zeros else None,
    )


def _ordered_codes(matrices: Sequence[PackedMatrix]) -> Iterator[torch.Tensor]:
    """The codes of matrices of one shape, some at a time where that can be."""
    n, k = matrices[0].shape
    together = 1 if n % UNIT else max(1, _AT_ONCE // (n * k))
    for first in range(0, len(matrices), together):
        values = []
        for matrix in matrices[first : first + together]:
            unpacked = unpack_bytes(matrix.codes, matrix.bits)
            values.append(unpacked[:, matrix.columns.start : matrix.columns.stop])
        yield ordered_codes(torch.cat(values), matrices[0].bits)


def _by_row(matrix: PackedMatrix, of_groups: torch.Tensor) -> torch.Tensor:
    """What the groups of each row have [N', groups]; N' rows fill 64s."""
    k, first = matrix.shape[1], matrix.lead + matrix.columns.start
    if matrix.group:
        begin = first // matrix.group
        of_groups = of_groups[:, begin : begin + k // matrix.group]
    else:
        of_groups = of_groups[:, :1].expand(-1, k // WHOLE_GROUP)
    if matrix.scale_rows is not None:
        of_groups = of_groups[matrix.scale_rows.long()]
    missing = -len(of_groups) % UNIT
    return torch.cat([of_groups, of_groups[-1:].expand(missing, -1)]) if missing else of_groups


def _by_eights(matrix: PackedMatrix) -> bool:
    """Whether each eight of rows has one scale, by where scales stand and not by their values."""
    if matrix.scale_rows is None:
        return False
    rows = matrix.scale_rows
    missing = -len(rows) % _SCALE_ROWS
    eights = torch.cat([rows, rows[-1:].expand(missing)]).unflatten(0, (-1, _SCALE_ROWS))
    return bool((eights == eights[:, :1]).all())
