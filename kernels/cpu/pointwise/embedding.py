"""Embedding rows and stored keys: copies of bits, or of keys and values in fp8."""

import torch

from tpdet.kernels.exact.fp8_rows import encode_pairs, rows_of
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import PAGE_TOKENS


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of table [V, H] for ids [M] int64 -> fp32 [M, H]; the nearest row for an id beyond."""
    return table.index_select(0, ids.clamp(0, len(table) - 1)).float()


def resolve_sampled(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """ids [M] int64, where -1 - i stands for sampled[i] -> ids [M]."""
    return torch.where(ids < 0, sampled[(-1 - ids).clamp(min=0)], ids)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Write k and v [M, Hkv, D] to their pages [P, Hkv, 256, D] at each row's position.

    Pages of uint8 [P, Hkv, 256 * (D + 1)] hold them in fp8 (`exact/fp8_rows.py`).
    """
    rows, pages, offsets = [], [], []
    for sequence in batch.sequences:
        for i in range(sequence.count):
            position = sequence.start + i
            rows.append(sequence.first_row + i)
            pages.append(sequence.pages[position // PAGE_TOKENS])
            offsets.append(position % PAGE_TOKENS)
    row, page, offset = (torch.tensor(x, dtype=torch.int64) for x in (rows, pages, offsets))
    write_rows(k[row], v[row], k_pages, v_pages, page, offset)


def write_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """`store_kv` of k and v [M, Hkv, D] to places `offset` [M] of pages numbered `page` [M]."""
    if k_pages.dtype != torch.uint8:
        k_pages[page, :, offset] = k
        v_pages[page, :, offset] = v
        return
    for pages, stored in zip((k_pages, v_pages), encode_pairs(k, v), strict=True):
        for part, values in zip(rows_of(pages, k.shape[2]), stored, strict=True):
            part[page, :, offset] = values
