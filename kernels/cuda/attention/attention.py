"""Paged attention on a GPU: the arithmetic of `split.py`, in two ways of sharing it out.

Sequences with many rows in the step run in `prefill.py` or `prefill_warp_specialised.py`, a
program a tile of rows; those with few in `decode.py`, a program a split and then a merge, or in
`streamed.py`, whose programs stay and take split after split.
Which way, how many rows and how many warps is free: no choice reaches a bit. `variants.py`
has one choice a shape; nothing is tuned at run time.
"""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.attention.decode_launch import launch_decode
from tpdet.kernels.cuda.attention.operands import attention_call
from tpdet.kernels.cuda.attention.prefill_launch import launch_prefill
from tpdet.kernels.cuda.attention.variants import (
    WIDE_ROWS,
    AttentionVariant,
    decode_variant,
    prefill_variant,
    streams_of,
)
from tpdet.kernels.exact.fp8_rows import fp8_page_bytes
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import PAGE_TOKENS


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [M, Hq, D] over pages [P, Hkv, 256, D] -> [M, Hq, D], q's dtype.

    Pages of uint8 [P, Hkv, 256 * (D + 1)] hold keys and values in fp8 (`exact/fp8_rows.py`).
    Query head h reads key head h // (Hq / Hkv). Keys and values of this step's rows are already
    stored. sinks: fp32 [Hq], or None. Rows that no sequence names come back as zeros. Raises
    ValueError when a layout or head size has no kernel.
    """
    rows = batch.short_rows * q.shape[1] // k_pages.shape[1]
    splits, sequences = batch.splits.shape[0], batch.short.shape[0]
    dtype, head, key_heads = q.dtype, q.shape[2], k_pages.shape[1]
    plain, gpu = not cap and sinks is None, hardware.gpu_of(q.device)
    fp8 = k_pages.dtype == torch.uint8
    prefill = prefill_variant(dtype, head, gpu, plain, fp8)
    streams = streams_of(dtype, head, gpu, plain and window is None, fp8)
    decode = decode_variant(dtype, head, rows, splits, sequences, key_heads, streams, fp8)
    return attend(q, k_pages, v_pages, batch, window, prefill, decode, cap, sinks)


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    prefill: AttentionVariant,
    decode: AttentionVariant,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` with given variants: they differ in speed alone."""
    _check(q, k_pages, v_pages, sinks)
    if k_pages.dtype == torch.uint8 and q.dtype != torch.float32:
        _check_fp8(prefill, decode)
    named = sum(sequence.count for sequence in batch.sequences)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if named < q.shape[0]:
        out[named:].zero_()
    call = attention_call(q, k_pages, v_pages, out, window, cap, sinks)
    launch_prefill(call, batch, prefill)
    launch_decode(call, batch, decode)
    return out


def _check_fp8(prefill: AttentionVariant, decode: AttentionVariant) -> None:
    """Refuse forms without Hopper's wide products: others add 8-bit operands in another order."""
    if prefill.rows < WIDE_ROWS or not decode.swapped:
        raise ValueError(
            f"{prefill} and {decode}: attention over fp8 pages has {WIDE_ROWS} rows of a prompt or "
            "more, and swapped products of few rows"
        )


def _check(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    head = q.shape[2]
    if head % 16 or not 16 <= head <= 256:
        raise ValueError(f"heads of {head}: attention needs a multiple of 16 up to 256")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k_pages.shape[1]} key heads")
    if q.stride(2) != 1 or q.stride(1) != head:
        raise ValueError(f"q has strides {q.stride()}: the heads of a row must be contiguous")
    for pages in (k_pages, v_pages):
        fp8 = pages.dtype == torch.uint8
        length = fp8_page_bytes(head) if fp8 else PAGE_TOKENS
        if not pages.is_contiguous() or pages.shape[2] != length:
            raise ValueError(f"pages {tuple(pages.shape)} {pages.stride()} must be contiguous")
        if not fp8 and pages.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} but the pages are {pages.dtype}")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32):
        raise ValueError(f"sinks are {sinks.dtype} {tuple(sinks.shape)}: give one fp32 a head of q")
