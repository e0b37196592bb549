"""Which chunks a step's rows lie in, and what one launch makes of them for the next."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS

CHUNK = tl.constexpr(CHUNK_TOKENS)


class Tables(NamedTuple):
    """Work of a step, on the device: `rows`, `states` and `pieces` of a `PagedBatch`.

    Pads of a graph's step are sequences without rows, and pieces of such.
    """

    rows: torch.Tensor
    states: torch.Tensor
    pieces: torch.Tensor

    @staticmethod
    def of(batch: PagedBatch) -> "Tables":
        """Those of a batch; nothing is copied."""
        return Tables(batch.rows, batch.states, batch.pieces)


class ChunkScratch(NamedTuple):
    """What is made of each piece's rows once, in chunk order, zeros where a chunk has no row.

    keys [T, Hk, 64, Dk]; products fp32 [T, Hv, 2, 64, 64]: p and p'; inverses fp32 [T, Hv, 64, 16];
    begun and left fp32 [T, Hv, 64]: decays from the chunk's start to a row, and from it to the end.
    """

    keys: torch.Tensor
    products: torch.Tensor
    inverses: torch.Tensor
    begun: torch.Tensor
    left: torch.Tensor


class LinearShape(NamedTuple):
    """What kernels are compiled for: Hk, Hv / Hk, sizes with their pads to powers of two, rings.

    TWO: whether fp32 operands have two bf16 terms.
    """

    KEY_HEADS: int
    GROUP: int
    KEY_SIZE: int
    KEY_LANES: int
    VALUE_SIZE: int
    COLUMNS: int
    RING: int
    TWO: bool


@triton.jit
def sequence_of(tables, index):
    """(first row, start, end, slot) of a sequence: its rows stand at positions [start, end)."""
    rows = tables.rows + index * 3
    start = tl.load(rows + 2)
    slot = tl.load(tables.states + index * 4).to(tl.int64)
    return tl.load(rows), start, start + tl.load(rows + 1), slot


@triton.jit
def rows_of_piece(tables, piece):
    """(first row, slot, chunk, low, high): rows [low, high) of the chunk are this step's."""
    chunk = tl.load(tables.pieces + piece * 2 + 1)
    first_row, start, end, slot = sequence_of(tables, tl.load(tables.pieces + piece * 2))
    low = tl.maximum(start - chunk * CHUNK, 0)
    high = tl.minimum(end - chunk * CHUNK, CHUNK)
    return first_row + chunk * CHUNK - start, slot, chunk, low, high
