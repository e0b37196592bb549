"""Paged attention on a GPU: the arithmetic of `attention_split`, in two ways of sharing it out.

Sequences with many rows in the step run in `attention_prefill`, a program a tile of rows; those
with few in `attention_decode`, a program a split and then a merge. Which way, how many rows and
how many warps is free: no choice reaches a bit. A table below has one choice a shape; nothing is
tuned at run time.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.attention_decode import attend_splits, merge_splits
from tpdet.kernels.cuda.attention_prefill import attend_blocks
from tpdet.kernels.cuda.attention_split import score_scale
from tpdet.kernels.order import PAGE_TOKENS, TILE_TOKENS
from tpdet.kernels.paged_batch import BLOCK_TOKENS, PagedBatch

_MERGE_UNROLL = 16


@dataclass(frozen=True)
class Variant:
    """How a kernel is shared out: rows of a program (a power of two up to 128), warps, stages.

    `descriptors`: whole splits are fetched by the tensor memory accelerator (Hopper and later).
    """

    rows: int
    warps: int
    stages: int
    descriptors: bool = False


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
) -> torch.Tensor:
    """Attention of q [M, Hq, D] over pages [P, Hkv, 256, D] -> [M, Hq, D], q's dtype.

    Query head h reads key head h // (Hq / Hkv). Keys and values of this step's rows are already
    stored. Rows that no sequence names come back as zeros. Raises ValueError when a layout or head
    size has no kernel.
    """
    group = q.shape[1] // k_pages.shape[1]
    return attend(
        q,
        k_pages,
        v_pages,
        batch,
        window,
        prefill_variant(q.dtype, q.shape[2], _has_descriptors(q.device)),
        decode_variant(q.dtype, q.shape[2], batch.short_rows * group),
    )


def prefill_variant(dtype: torch.dtype, head: int, descriptors: bool) -> Variant:
    """The choice for sequences with many rows; `descriptors`: whether the GPU has them."""
    if dtype == torch.float32:
        return Variant(16, 4, 1)
    if head <= 128:
        return Variant(64, 4, 3 if descriptors else 2, descriptors)
    return Variant(64, 8, 2, descriptors)


@cache
def _has_descriptors(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def decode_variant(dtype: torch.dtype, head: int, rows: int) -> Variant:
    """The choice for sequences with few: `rows` is the most rows times query heads of a group."""
    if dtype == torch.float32:
        return Variant(16, 4, 1)
    if rows <= 16:
        return Variant(16, 2, 3) if head <= 128 else Variant(16, 4, 2)
    return Variant(32, 4, 2) if rows <= 32 else Variant(64, 4, 2)


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    prefill: Variant,
    decode: Variant,
) -> torch.Tensor:
    """`paged_attention` with given variants: they differ in speed alone."""
    _check(q, k_pages, v_pages)
    named = sum(sequence.count for sequence in batch.sequences)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if named < q.shape[0]:
        out[named:].zero_()
    _launch_prefill(q, k_pages, v_pages, batch, window, prefill, out)
    _launch_decode(q, k_pages, v_pages, batch, window, decode, out)
    return out


def _launch_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    variant: Variant,
    out: torch.Tensor,
) -> None:
    if not batch.blocks.shape[0]:
        return
    shape = _shape(q, k_pages, window)
    parts = BLOCK_TOKENS * shape["GROUP"] // variant.rows
    tiles: tuple[torch.Tensor | TensorDescriptor, ...] = (k_pages, v_pages)
    if variant.descriptors:
        flat = [pages.view(-1, q.shape[2]) for pages in (k_pages, v_pages)]
        block = [TILE_TOKENS, shape["LANES"]]
        tiles = tuple(TensorDescriptor.from_tensor(pages, block) for pages in flat)
    attend_blocks[(batch.blocks.shape[0] * parts * shape["KEY_HEADS"],)](
        q,
        k_pages,
        v_pages,
        *tiles,
        out,
        batch.blocks,
        batch.rows,
        batch.tables,
        q.stride(0),
        batch.tables.shape[1],
        window or 0,
        score_scale(q.shape[2]),
        **shape,
        DESCRIPTORS=variant.descriptors,
        BLOCK=BLOCK_TOKENS,
        ROWS=variant.rows,
        STAGES=variant.stages,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
    )


def _launch_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    variant: Variant,
    out: torch.Tensor,
) -> None:
    """Splits in parallel, then their merge; the fp32 workspace is this call's own."""
    if not batch.splits.shape[0]:
        return
    shape = _shape(q, k_pages, window)
    row_count = batch.short_rows * shape["GROUP"]
    row_parts = triton.cdiv(row_count, variant.rows)
    states = batch.splits.shape[0] * shape["KEY_HEADS"] * row_count
    largest = torch.empty(states, dtype=torch.float32, device=q.device)
    mass = torch.empty(states, dtype=torch.float32, device=q.device)
    total = torch.empty(states, q.shape[2], dtype=torch.float32, device=q.device)
    attend_splits[(batch.splits.shape[0] * row_parts * shape["KEY_HEADS"],)](
        q,
        k_pages,
        v_pages,
        largest,
        mass,
        total,
        batch.splits,
        batch.rows,
        batch.tables,
        q.stride(0),
        batch.tables.shape[1],
        window or 0,
        row_count,
        row_parts,
        score_scale(q.shape[2]),
        **shape,
        ROWS=variant.rows,
        STAGES=variant.stages,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
    )
    merge_splits[(batch.short.shape[0] * batch.short_rows * q.shape[1],)](
        out,
        largest,
        mass,
        total,
        batch.short,
        batch.rows,
        window or 0,
        row_count,
        batch.short_rows,
        **shape,
        UNROLL=_MERGE_UNROLL,
        num_warps=max(1, shape["LANES"] // 128),
        enable_fp_fusion=False,
    )


def _shape(q: torch.Tensor, k_pages: torch.Tensor, window: int | None) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {
        "KEY_HEADS": k_pages.shape[1],
        "GROUP": q.shape[1] // k_pages.shape[1],
        "HEAD": q.shape[2],
        "LANES": triton.next_power_of_2(q.shape[2]),
        "WINDOW": window is not None,
    }


def _check(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    head = q.shape[2]
    if head % 16 or not 16 <= head <= 256:
        raise ValueError(f"heads of {head}: attention needs a multiple of 16 up to 256")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k_pages.shape[1]} key heads")
    if q.stride(2) != 1 or q.stride(1) != head:
        raise ValueError(f"q has strides {q.stride()}: the heads of a row must be contiguous")
    for pages in (k_pages, v_pages):
        if not pages.is_contiguous() or pages.shape[2] != PAGE_TOKENS:
            raise ValueError(f"pages {tuple(pages.shape)} {pages.stride()} must be contiguous")
        if pages.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} but the pages are {pages.dtype}")
