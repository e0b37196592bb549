"""Weights as codes and scales: rows of a matrix become numbers when they are read.

    w = round((q - zero) * scale)        each step in fp32, then one rounding to the model's dtype

That is the rule of docs/checkpoints.md, the one for weights that are dequantised when they are
loaded, too. A scale belongs to an element, so a matrix may be cut anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch

from tpdet.kernels.inputs.gated import GROUP, interleaved
from tpdet.kernels.inputs.ordered import OrderedWeight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_InPlace = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K]: columns `columns` of `codes`, in its groups, times `scales`.

    kind: of codes: "int", "e4m3" or "e2m1". codes: uint8 [N, bytes]; of 4 bits the first is the low
    half. scales: [S, G] as stored, uint8 for exponents (e8m0). group: columns that share a scale, 0
    for all; lead: columns that the first group has before the first code. scale_rows: the row of
    `scales` of each row, None for its own. zeros: uint8 [N, bytes], packed as codes, of each
    scale, None for none; `zero` is added to each. dtype: what rows are rounded to.
    """

    kind: str
    bits: int
    codes: torch.Tensor
    columns: range
    scales: torch.Tensor
    group: int
    lead: int = 0
    scale_rows: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    zero: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]"""
        return len(self.codes), len(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = self.codes, self.scales, self.scale_rows, self.zeros
        return sum(part.nbytes for part in parts if part is not None)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Neighbouring rows [n, K] in `dtype`."""
        return self.cut(rows, range(len(self.columns))).numbers().to(self.dtype)

    def on(self, device: torch.device) -> "PackedMatrix":
        """The same on a device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            scale_rows=None if self.scale_rows is None else self.scale_rows.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
        )

    def cut(self, rows: slice, columns: range) -> "PackedMatrix":
        """A part of it, by neighbouring rows and columns, without a copy."""
        first = self.columns.start
        return replace(
            self,
            codes=self.codes[rows],
            columns=range(first + columns.start, first + columns.stop),
            scales=self.scales if self.scale_rows is not None else self.scales[rows],
            scale_rows=None if self.scale_rows is None else self.scale_rows[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
        )

    def numbers(self) -> torch.Tensor:
        """All of it in fp32, not rounded to `dtype`."""
        per_byte = 8 // self.bits
        first, last = self.columns.start, self.columns.stop
        begin, end = first // per_byte, -(-last // per_byte)
        skipped = first - begin * per_byte
        numbers = self._codes(self.codes[:, begin:end])[:, skipped : skipped + len(self.columns)]
        if self.zeros is not None:
            self._by_group(numbers, torch.Tensor.sub_, self._zeros())
        scales = self.scales
        if self.scale_rows is not None:
            scales = scales[self.scale_rows.int()]
        self._by_group(numbers, torch.Tensor.mul_, _scale_numbers(scales))
        return numbers

    def _codes(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 [N, bytes] -> fp32, less the zero point where that is one for all."""
        constant = self.zero if self.zeros is None else 0
        return _looked_up(codes, code_table(self.kind, self.bits, constant), self.bits)

    def _zeros(self) -> torch.Tensor:
        """Zero points in fp32 [N, G]."""
        assert self.zeros is not None
        numbers = _looked_up(self.zeros, code_table("int", self.bits, -self.zero), self.bits)
        return numbers[:, : self.scales.shape[1]]

    def _by_group(
        self, numbers: torch.Tensor, operation: _InPlace, of_groups: torch.Tensor
    ) -> None:
        """Change fp32 [N, K] in place by one value [N, G] of each group."""
        if not self.group:
            operation(numbers, of_groups)
            return
        first = self.lead + self.columns.start
        last = self.lead + self.columns.stop
        here = of_groups[:, first // self.group : -(-last // self.group)]
        skipped = first % self.group
        if skipped or last % self.group:
            wide = here.repeat_interleave(self.group, 1)
            operation(numbers, wide[:, skipped : skipped + last - first])
        else:
            operation(numbers.unflatten(1, (-1, self.group)), here[:, :, None])

    def compact(self) -> "PackedMatrix":
        """A copy that holds no byte that it does not need."""
        per_byte = 8 // self.bits
        first, last = self.columns.start, self.columns.stop
        begin, end = first // per_byte, -(-last // per_byte)
        size = self.group or 1
        skipped = (self.lead + begin * per_byte) // size if self.group else 0
        after = -(-(self.lead + last) // size) if self.group else 1
        lead = self.lead + begin * per_byte - skipped * size if self.group else 0
        zeros = None
        if self.zeros is not None:
            zeros = pack(self.zero_codes()[:, skipped:after].clone(), self.bits)
        scales, scale_rows = self.scales[:, skipped:after], self.scale_rows
        if scale_rows is not None and len(scale_rows):
            least, most = int(scale_rows.min()), int(scale_rows.max())
            scales, scale_rows = scales[least : most + 1], scale_rows - least
        return replace(
            self,
            codes=self.codes[:, begin:end].clone(),
            columns=range(first - begin * per_byte, last - begin * per_byte),
            scales=scales.clone(),
            lead=lead,
            scale_rows=scale_rows,
            zeros=zeros,
        )

    def zero_codes(self) -> torch.Tensor:
        """Zero points uint8 [N, G], less `zero`, which is added to each."""
        assert self.zeros is not None
        return unpack_bytes(self.zeros, self.bits)[:, : self.scales.shape[1]]

    def with_rows(self, order: torch.Tensor) -> "PackedMatrix":
        """Row order[i] of it as row i, zeros where that is below 0: a copy."""
        rows, blank = order.clamp(min=0), order < 0
        codes, zeros = self.codes[rows], None if self.zeros is None else self.zeros[rows]
        codes[blank] = self.zero | (self.zero << 4 if self.bits == 4 else 0)
        if zeros is not None:
            zeros[blank] = 0
        if self.scale_rows is not None:  # of another row: zero times it is zero
            return replace(self, codes=codes, zeros=zeros, scale_rows=self.scale_rows[rows])
        scales = self.scales[rows]
        scales[blank] = _E8M0_BIAS if scales.dtype == torch.uint8 else 1
        return replace(self, codes=codes, zeros=zeros, scales=scales)


class PackedStack:
    """Several matrices, such as a layer's experts or a row product's leaves, [L, N, K]."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.matrices = tuple(matrices)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[L, N, K], K of the first."""
        return len(self.matrices), *self.matrices[0].shape

    def __getitem__(self, index: int) -> PackedMatrix:
        return self.matrices[index]


Weight = torch.Tensor | PackedMatrix | OrderedWeight
WeightStack = torch.Tensor | PackedStack | OrderedWeight
"""What a product reads: numbers, or codes that become numbers when they are read. Those of a CPU
lie as in the checkpoint, those of a GPU in the order of its kernels."""


def join_rows(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """The rows of matrices of one form and one width, one behind the other."""
    first, scale_rows, zeros = parts[0], None, None
    if first.scale_rows is not None:
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.scales))
        scale_rows = torch.cat(
            [
                part.scale_rows + start
                for part, start in zip(parts, starts, strict=False)
                if part.scale_rows is not None
            ]
        )
    if first.zeros is not None:
        zeros = torch.cat([part.zeros for part in parts if part.zeros is not None])
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        scale_rows=scale_rows,
        zeros=zeros,
    )


def join_columns(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """The columns of matrices of one form, side by side, each of which begins a group of its own.

    All have the same rows, and no zero points; every part but the last fills its groups and bytes.
    """
    widths = sum(len(part.columns) for part in parts)
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], 1),
        columns=range(widths),
        scales=torch.cat([part.scales for part in parts], 1),
    )


def interleaved_rows(gate: PackedMatrix, up: PackedMatrix) -> PackedMatrix:
    """Gate and up [I, K] as one weight in turn (`kernels/inputs/gated.py`), zeros up to groups."""
    width = gate.shape[0]
    order = torch.full((width + -width % GROUP,), -1)
    order[:width] = torch.arange(width)
    both = interleaved(order, torch.where(order < 0, order, order + width))
    return join_rows([gate, up]).with_rows(both)


def side_by_side(matrix: PackedMatrix, widths: Sequence[int]) -> PackedStack:
    """A matrix [N, sum of widths] as one of each width, without a copy."""
    edges = [0]
    for width in widths:
        edges.append(edges[-1] + width)
    return PackedStack(
        [matrix.cut(slice(None), range(first, last)) for first, last in pairwise(edges)]
    )


def numbers_of(memory: Weight | WeightStack | None) -> torch.Tensor | None:
    """Memory of numbers that a reload can write over; None for codes, which it replaces."""
    return memory if isinstance(memory, torch.Tensor) else None


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] below 2^bits -> uint8 [N, bytes]; of 4 bits the first is the low half."""
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes.contiguous()
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


def unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse: uint8 [N, bytes] -> uint8 codes, of 4 bits twice as many."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)


def _looked_up(codes: torch.Tensor, table: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, bytes] -> fp32 [N, as many codes]."""
    numbers = table.to(codes.device).index_select(0, codes.flatten().int()).view(torch.float32)
    return numbers.view(len(codes), codes.shape[1] * 8 // bits)


@cache
def code_table(kind: str, bits: int, zero: int) -> torch.Tensor:
    """The numbers of the 256 values of a byte: fp32 [256], or of 4 bits pairs of them, as int64.

    zero: what is subtracted from integers.
    """
    byte = torch.arange(256)
    if kind == "e4m3":
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    else:
        numbers = torch.arange(1 << bits).float() - zero
    if bits == 8:
        return numbers
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], 1).view(torch.int64)[:, 0]


def _scale_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32; e8m0's are powers of two, of which 2^-127 is subnormal."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - _E8M0_BIAS)
