"""From packed matrices to `OrderedWeight`, on a GPU; and which ones no kernel reads."""

from collections.abc import Sequence

import torch

from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    UNIT,
    OrderedWeight,
    ordered_codes,
)
from tpdet.kernels.inputs.packed import PackedMatrix, unpack_bytes

WIDTH = 2 * UNIT
"""A leaf's columns are a multiple of it."""
_SCALE_ROWS = 8  # rows that share a scale of blocks: gates and ups lie by eights
_GROUPS = (32, 64, 128)
_INT4_ZERO = 8
_OF_INT4 = {torch.bfloat16: INT4, torch.float16: INT4_OF_HALF}


def refusal(matrix: PackedMatrix, widths: Sequence[int]) -> str:
    """Why no kernel reads a matrix whose chains are so wide; empty if one does."""
    if matrix.dtype != torch.bfloat16:
        return f"a model in {str(matrix.dtype).removeprefix('torch.')}"
    if matrix.zeros is not None:
        return "zero points"
    if _recipe(matrix) is None:
        scales = str(matrix.scales.dtype).removeprefix("torch.")
        return f"{matrix.bits}-bit {matrix.kind} with scales in {scales}"
    if matrix.group not in _GROUPS:
        return f"groups of {matrix.group} columns" if matrix.group else "one scale for a row"
    odd = [width for width in widths if width % WIDTH]
    return f"chains of {odd[0]} columns, no multiple of {WIDTH}" if odd else ""


def _recipe(matrix: PackedMatrix) -> int | None:
    if matrix.kind == "int":
        symmetric = matrix.bits == 4 and matrix.zero == _INT4_ZERO
        return _OF_INT4.get(matrix.scales.dtype) if symmetric else None
    return E4M3 if matrix.kind == "e4m3" else E2M1


def ordered_weight(matrices: Sequence[PackedMatrix]) -> OrderedWeight:
    """Leaves [N, K] of one matrix, on their device. Raises ValueError for what no kernel reads."""
    first = matrices[0]
    (n, k), recipe, why = first.shape, _recipe(first), refusal(first, [first.shape[1]])
    if why or recipe is None:
        raise ValueError(f"no kernel reads {why}")
    codes, scales = [], []
    for matrix in matrices:
        begin = matrix.lead + matrix.columns.start
        if begin % matrix.group or matrix.shape != (n, k):
            raise ValueError(f"a leaf {matrix.shape} that begins inside a group")
        values = unpack_bytes(matrix.codes, matrix.bits)
        own = values[:, matrix.columns.start : matrix.columns.stop]
        codes.append(ordered_codes(own, first.bits))
        scales.append(_scales(matrix, begin // matrix.group, k // matrix.group))
    rows = _SCALE_ROWS if all(map(_by_eights, matrices)) else 1
    return OrderedWeight(
        recipe,
        first.bits,
        torch.cat(codes),
        torch.stack([of_leaf[::rows].T for of_leaf in scales]).contiguous(),
        first.group,
        rows,
        (len(matrices), n, k),
    )


def _scales(matrix: PackedMatrix, first: int, count: int) -> torch.Tensor:
    """Scales of each row [N', count] as stored; N' rows fill 64s."""
    scales = matrix.scales[:, first : first + count]
    if matrix.scale_rows is not None:
        scales = scales[matrix.scale_rows.long()]
    missing = -len(scales) % UNIT
    return torch.cat([scales, scales[-1:].expand(missing, -1)]) if missing else scales


def _by_eights(matrix: PackedMatrix) -> bool:
    """Whether each eight of rows has one scale, by where scales stand and not by their values."""
    if matrix.scale_rows is None:
        return False
    rows = matrix.scale_rows
    missing = -len(rows) % _SCALE_ROWS
    eights = torch.cat([rows, rows[-1:].expand(missing)]).unflatten(0, (-1, _SCALE_ROWS))
    return bool((eights == eights[:, :1]).all())
