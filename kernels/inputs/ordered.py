"""A packed weight in the order in which a GPU's kernels read it: each thread its own, by 16 bytes.

Codes of 64 rows by 64 columns lie together. The matrix instruction gives thread (w, g, t) of a
warpgroup, w < 4, g < 8, t < 4, the rows 16 w + g and 8 on, and of each 16 columns 2 t, 2 t + 1 and
both 8 on. A word of 32 bits has codes of one row: of 8 bits, byte 2 h + i is column 2 t + i + 8 h;
of 4 bits, nibble h + 4 i. Four words of a thread stand together: both of its rows, for two
neighbouring words along K.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

UNIT = 64
"""Rows, and columns, of codes that lie together."""
SCRATCH_BYTES = 256 << 20
"""What the numbers of a weight take in scratch at most: tiles alone unpack a larger one."""
E4M3, INT4, INT4_OF_HALF, E2M1, INT4_ZERO, INT4_ZERO_OF_HALF, INT8 = range(7)
"""Ways by which codes become numbers (`cuda/gemm/packed/recipes.py`); of int4 scales are bf16 or
fp16, and there are zero points or none."""


class OrderedForm(NamedTuple):
    """What a kernel is compiled for, and its start-up check draws; as of `OrderedWeight`.

    scales: their dtype's name.
    """

    recipe: int
    bits: int
    group: int
    scale_rows: int
    scales: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class OrderedWeight:
    """Leaves [L, N, K] of one form, on a GPU; a column product has one.

    recipe: one of the ways. codes: int32 [L * blocks, K / 64 * lines, 32], a block 64 rows.
    scales: [L, K / group, blocks * 64 / scale_rows] as stored. group: columns that share a scale;
    scale_rows: rows that do. shape: [L, N, K]. zeros: uint8, the zero points of scales, if any.
    """

    recipe: int
    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    scale_rows: int
    shape: tuple[int, int, int]
    zeros: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    @property
    def form(self) -> OrderedForm:
        """Its form."""
        dtype = str(self.scales.dtype).removeprefix("torch.")
        return OrderedForm(self.recipe, self.bits, self.group, self.scale_rows, dtype, self.shape)

    def copy_(self, other: "OrderedWeight") -> "OrderedWeight":
        """This one, with the values of another of its form: graphs hold the addresses."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros.copy_(other.zeros)
        return self


def ordered_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [N, K], one a value -> int32 [N' / 64, K / 64 * lines, 32]; N' rows fill 64s.

    Raises ValueError where 64 does not divide K.
    """
    n, k = codes.shape
    if k % UNIT:
        raise ValueError(f"{k} columns are no multiple of {UNIT}")
    if n % UNIT:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -n % UNIT))
    blocks = codes.unflatten(0, (-1, 4, 2, 8))  # block, w, first or second row, g
    if bits == 8:
        # K is cut into 64s, passes of 32, words of 16; then h, t, i
        parts = blocks.unflatten(4, (-1, 2, 2, 2, 4, 2)).permute(0, 4, 5, 1, 3, 8, 6, 2, 7, 9)
        words = parts.flatten(8).contiguous().view(torch.int32)
    else:
        # K is cut into 64s, words of 32; then h, t, i
        parts = blocks.unflatten(4, (-1, 2, 4, 4, 2)).permute(0, 4, 1, 3, 7, 5, 2, 8, 6)
        parts = parts.flatten(7).contiguous()
        words = (parts[..., ::2] | parts[..., 1::2] << 4).contiguous().view(torch.int32)
    return words.reshape(words.shape[0], -1, 32)
