"""Which chunks a step's rows lie in, and what one launch makes of them for the next."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS

CHUNK = tl.constexpr(CHUNK_TOKENS)
SEQUENCE_FIELDS = tl.constexpr(6)


class Tables(NamedTuple):
    """Work of a step: sequences int32 [B, 6] (first row, count, start, slot, drafts, first piece),
    pieces int32 [T, 2] (sequence, chunk), in order of sequences and chunks.
    """

    sequences: torch.Tensor
    pieces: torch.Tensor


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
def rows_of_piece(tables, piece):
    """(first row, slot, chunk, low, high): rows [low, high) of the chunk are this step's."""
    sequence = tl.load(tables.pieces + piece * 2)
    chunk = tl.load(tables.pieces + piece * 2 + 1)
    fields = tables.sequences + sequence * SEQUENCE_FIELDS
    start = tl.load(fields + 2)
    low = tl.maximum(start - chunk * CHUNK, 0)
    high = tl.minimum(start + tl.load(fields + 1) - chunk * CHUNK, CHUNK)
    first_row = tl.load(fields) + chunk * CHUNK - start
    return first_row, tl.load(fields + 3).to(tl.int64), chunk, low, high


def make_tables(batch: PagedBatch, device: torch.device) -> Tables:
    """The tables of a batch, on its device."""
    sequences: list[tuple[int, ...]] = []
    pieces: list[tuple[int, int]] = []
    for each in batch.sequences:
        fields = each.first_row, each.count, each.start, each.slot, int(each.drafts), len(pieces)
        if each.count:
            chunks = range(each.start // CHUNK_TOKENS, (each.length - 1) // CHUNK_TOKENS + 1)
            pieces += [(len(sequences), chunk) for chunk in chunks]
            sequences.append(fields)
    return Tables(
        torch.tensor(sequences, dtype=torch.int32, device=device).view(-1, 6),
        torch.tensor(pieces, dtype=torch.int32, device=device).view(-1, 2),
    )
