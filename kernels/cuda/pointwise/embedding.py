"""Embedding rows and stored keys on a GPU: copies of values, or of keys and values in fp8.

Shapes: M rows, V ids of the vocabulary, H values of a row, Hkv key heads of D values.

    ids, slots [M] int64    table [V, H]    k, v [M, Hkv, D]
    k_pages, v_pages [P, Hkv, 256, D], or in fp8 uint8 [P, Hkv, 256 * (D + 1)]
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.fp8_rows import (
    PAGE,
    codes_of,
    exponent_byte,
    exponent_of,
    key_bits,
    largest_bits,
    least_exponent,
    value_exponent_byte,
)
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import PAGE_TOKENS

_IDS = 256  # token ids of a program
_WIDE_BLOCK = 2048  # values of a row that a program copies at a time


@triton.jit
def widen_rows(ids, table, y, last, H: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """y[i] = fp32 of row ids[i] of table [last + 1, H]. Grid: rows."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    # An id beyond the table (of a row that sampled nothing) must not become a wild address.
    wanted = tl.minimum(tl.maximum(tl.load(ids + row), 0), last)
    for first in tl.static_range(0, H, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(table + wanted * H + at, mask=at < H, other=0)
        tl.store(y + row * H + at, value.to(tl.float32), mask=at < H)


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of table [V, H] for ids [M] int64 -> fp32 [M, H]; the nearest row for an id beyond."""
    (rows,), (vocabulary, width) = ids.shape, table.shape
    y = torch.empty(rows, width, dtype=torch.float32, device=table.device)
    if rows:
        widen_rows[(rows,)](
            ids,
            table,
            y,
            vocabulary - 1,
            H=width,
            BLOCK=min(_WIDE_BLOCK, next_power_of_2(width)),
            num_warps=4,
            **dependent_launch(ids.device),
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _resolve(ids, sampled, out, rows, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < rows, other=0)
    named = tl.load(sampled + (-1 - token), mask=(at < rows) & (token < 0), other=0)
    tl.store(out + at, tl.where(token < 0, named, token), mask=at < rows)


def resolve_sampled(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """ids [M] int64, where -1 - i stands for sampled[i] -> ids [M]."""
    out = torch.empty_like(ids)
    if ids.numel():
        grid = (cdiv(ids.numel(), _IDS),)
        _resolve[grid](
            ids, sampled, out, ids.numel(), BLOCK=_IDS, num_warps=1, **dependent_launch(ids.device)
        )
    return out


@triton.jit
def _store_rows(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_stride,
    v_stride,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: slots [M] x blocks of a row's Hkv * D values."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < KEY_HEADS * HEAD
    head = index // HEAD
    page = (slot // PAGE) * (KEY_HEADS * PAGE * HEAD) + (slot % PAGE) * HEAD
    to = page + head * (PAGE * HEAD) + index % HEAD
    key = tl.load(k + row.to(tl.int64) * k_stride + index, mask=inside)
    value = tl.load(v + row.to(tl.int64) * v_stride + index, mask=inside)
    tl.store(k_pages + to, key, mask=inside)
    tl.store(v_pages + to, value, mask=inside)


@triton.jit
def _store_fp8_rows(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_stride,
    v_stride,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: slots [M] x key heads."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    lane = tl.arange(0, LANES)
    inside = lane < HEAD
    to_row = row.to(tl.int64)
    key = tl.load(k + to_row * k_stride + head * HEAD + lane, mask=inside, other=0.0)
    value = tl.load(v + to_row * v_stride + head * HEAD + lane, mask=inside, other=0.0)
    LEAST: tl.constexpr = least_exponent(k.dtype.element_ty)
    page = ((slot // PAGE) * KEY_HEADS + head) * (PAGE * (HEAD + 1))
    code_at = page + (slot % PAGE) * HEAD + lane
    byte_at = page + PAGE * HEAD + slot % PAGE
    of_value = tl.max(largest_bits(value.to(tl.float32), inside), 0)
    of_key = key_bits(tl.max(largest_bits(key.to(tl.float32), inside), 0), of_value)
    exponent = exponent_of(of_key, LEAST)
    tl.store(k_pages + code_at, codes_of(key.to(tl.float32), of_key, exponent), mask=inside)
    tl.store(k_pages + byte_at, exponent_byte(of_key, exponent))
    exponent = exponent_of(of_value, LEAST)
    tl.store(v_pages + code_at, codes_of(value.to(tl.float32), of_value, exponent), mask=inside)
    tl.store(v_pages + byte_at, value_exponent_byte(of_value, exponent, LEAST))


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Write k and v [M, Hkv, D] to their pages at each row's position, in fp8 if these are uint8.

    Rows of k and v may lie apart (a part of a wider product); their heads may not. Raises
    ValueError for another layout.
    """
    rows = batch.slots.shape[0]
    if not rows:
        return
    key_heads, head = k.shape[1:]
    for x in (k, v):
        if x.stride(2) != 1 or x.stride(1) != head:
            raise ValueError(f"strides {x.stride()}: the heads of a row must be contiguous")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("the pages must be contiguous")
    if k_pages.dtype == torch.uint8:
        _store_fp8_rows[(rows, key_heads)](
            k,
            v,
            k_pages,
            v_pages,
            batch.slots,
            k.stride(0),
            v.stride(0),
            KEY_HEADS=key_heads,
            HEAD=head,
            LANES=next_power_of_2(head),
            num_warps=1,
            enable_fp_fusion=False,
            **dependent_launch(k.device),
        )
        return
    block = min(1024, next_power_of_2(key_heads * head))
    _store_rows[(rows, cdiv(key_heads * head, block))](
        k,
        v,
        k_pages,
        v_pages,
        batch.slots,
        k.stride(0),
        v.stride(0),
        KEY_HEADS=key_heads,
        HEAD=head,
        PAGE=PAGE_TOKENS,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(k.device),
    )
