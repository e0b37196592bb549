"""Which chunks a step's rows lie in, and what one launch makes of them for the next."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS

CHUNK = tl.constexpr(CHUNK_TOKENS)
# Tiles [16, 16] of a chunk's products, a term's one after the other: p and p' by blocks of rows up
# to the diagonal, then T. Vectors [64] of its rows: e, d_Cj, c, n, m; from SPARE on those that the
# pass does not read: prefix sums of log decays in fp64.
KEYS, QUERIES, INVERSE, TILES = (tl.constexpr(first) for first in (0, 10, 20, 24))
VECTORS, SPARE = tl.constexpr(8), tl.constexpr(5)
PIECE_FIELDS, KEPT = tl.constexpr(3), tl.constexpr(2)


class Tables(NamedTuple):
    """Work of a step, on the device: lists of a `PagedBatch`, which explains them.

    Pads of a graph's step are sequences without rows, and pieces and runs of such. Grids count
    lists from what stands in them on, so that no work waits behind pads, which are most of a list.
    """

    rows: torch.Tensor
    states: torch.Tensor
    pieces: torch.Tensor
    runs: torch.Tensor

    @staticmethod
    def of(batch: PagedBatch) -> "Tables":
        """Those of a batch; nothing is copied."""
        return Tables(batch.rows, batch.states, batch.pieces, batch.runs)


class ChunkScratch(NamedTuple):
    """What is made of each piece's rows once, in chunk order, zeros where a chunk has no row.

    tiles [T, Hv, terms, 24, 16, 16] in bf16 terms or fp32; vectors fp32 [T, Hv, 8, 64]. Of pieces
    that are no whole chunk before a sequence's last: keys [T, Hk, 64, Dk], inverses fp32
    [T, Hv, 64, 16] and decays int64 [T, Hv, 64], for the rings.
    """

    tiles: torch.Tensor
    vectors: torch.Tensor
    keys: torch.Tensor
    inverses: torch.Tensor
    decays: torch.Tensor


class DecodeScratch(NamedTuple):
    """What is made of each sequence's one new row: of B sequences.

    rows bf16 [B, Hk, 2, Dk]: key and query; weights bf16 [B, Hv, terms, 2, 64]: p and p' of the
    chunk's rows, +0 behind the new one; factors fp32 [B, Hv, 4]: e, c, n and m.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    factors: torch.Tensor


class LinearShape(NamedTuple):
    """What kernels are compiled for: Hk, Hv / Hk, sizes with their pads to powers of two, rings.

    TWO: whether fp32 operands have two bf16 terms. ALONE: whether sequences with one row have
    kernels of their own (`decode_rows.py`), and are none of the others'.
    """

    KEY_HEADS: int
    GROUP: int
    KEY_SIZE: int
    KEY_LANES: int
    VALUE_SIZE: int
    COLUMNS: int
    RING: int
    TWO: bool
    ALONE: bool


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
    chunk = tl.load(tables.pieces + piece * PIECE_FIELDS + 1)
    first_row, start, end, slot = sequence_of(tables, tl.load(tables.pieces + piece * PIECE_FIELDS))
    low = tl.maximum(start - chunk * CHUNK, 0)
    high = tl.minimum(end - chunk * CHUNK, CHUNK)
    return first_row + chunk * CHUNK - start, slot, chunk, low, high


@triton.jit
def sequence_at(tables, number, ALONE: tl.constexpr):
    """A sequence by its number: among those with more than one row, where others are ALONE."""
    return tl.load(tables.runs + number) if ALONE else number


def pieces_of_runs(batch: PagedBatch) -> int:
    """How many of a batch's pieces, from the first on, are of sequences with more than one row.

    At most: pads are among them.
    """
    return min(len(batch.pieces), batch.row_count // CHUNK_TOKENS + 2 * len(batch.runs))


def has_rows_alone(batch: PagedBatch) -> bool:
    """Whether a sequence of a batch may have a single row."""
    return len(batch.states) > len(batch.runs)
