"""Queries rotated, keys rotated and stored, values stored: one launch with the bits of three.

The arithmetic is `rotary.rotated_halves`, which `rotate_heads` uses too; the pages are written as
`embedding.store_kv` writes them. A program takes some heads of one row: queries, keys or values.

Shapes: M rows, Hq query heads, Hkv key heads, D values of a head, P pages of 256 tokens.

    q, out [M, Hq, D]    k, v [M, Hkv, D]
    k_pages, v_pages [P, Hkv, 256, D], or in fp8 uint8 [P, Hkv, 256 * (D + 1)]
    positions, slots [M] int64    cos, sin [positions, D / 2] fp32    query_norm, key_norm [D]
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.fp8_rows import (
    codes_of,
    exponent_byte,
    exponent_of,
    key_bits,
    largest_bits,
    least_exponent,
    page_size,
    value_exponent_byte,
)
from tpdet.kernels.cuda.pointwise.norm import eps_bits
from tpdet.kernels.cuda.pointwise.rotary import rotated_halves
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import PAGE_TOKENS


@dataclass(frozen=True)
class HeadShare:
    """How many heads a program takes, a power of two, and its warps."""

    heads: int
    warps: int


FEW_ROWS = HeadShare(2, 1)
MANY_ROWS = HeadShare(8, 2)  # 16 bytes a thread of each half of a head of 128
_FEW = 32
_PAGE = tl.constexpr(PAGE_TOKENS)


def share(rows: int) -> HeadShare:
    """The choice for a step of `rows` rows: few rows are spread over more programs."""
    return FEW_ROWS if rows <= _FEW else MANY_ROWS


class RotationForm(NamedTuple):
    """What `rotate_and_store_heads` is compiled for: heads, D / 2, and that to a power of two.

    NORM: whether there are norms, with eps as fp64 bits. BLOCK: heads of a program.
    """

    QUERY_HEADS: int
    KEY_HEADS: int
    HALF: int
    LANES: int
    NORM: bool
    EPS_BITS: int
    BLOCK: int


@triton.jit
def rotate_and_store_heads(
    q,
    k,
    v,
    tables,
    norms,
    positions,
    slots,
    out,
    pages,
    strides,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: rows x parts (of queries, then of keys, then of values), BLOCK heads each.

    Of tuples: tables cos and sin; norms of queries and of keys; pages of keys and of values;
    strides of rows of q, k and v. out [M, Hq, D] is contiguous.
    """
    # 1. Wait for earlier kernels; choose this program's row and heads.
    await_earlier(DEPENDENT)
    BLOCK: tl.constexpr = FORM.BLOCK
    HALF: tl.constexpr = FORM.HALF
    LANES: tl.constexpr = FORM.LANES
    QUERY_HEADS: tl.constexpr = FORM.QUERY_HEADS
    KEY_HEADS: tl.constexpr = FORM.KEY_HEADS
    QUERY_PARTS: tl.constexpr = (QUERY_HEADS + BLOCK - 1) // BLOCK
    KEY_PARTS: tl.constexpr = (KEY_HEADS + BLOCK - 1) // BLOCK
    HEAD: tl.constexpr = 2 * HALF
    cos, sin = tables
    query_norm, key_norm = norms
    k_pages, v_pages = pages
    q_stride, k_stride, v_stride = strides
    FP8: tl.constexpr = k_pages.dtype.element_ty == tl.uint8
    SIZE: tl.constexpr = page_size(k_pages.dtype.element_ty, HEAD)
    LEAST: tl.constexpr = least_exponent(k.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, LANES)
    if part < QUERY_PARTS + KEY_PARTS:
        turn = tl.load(positions + row) * HALF + lane
        c = tl.load(cos + turn, mask=lane < HALF, other=0.0)
        s = tl.load(sin + turn, mask=lane < HALF, other=0.0)
        # 2. Rotate queries.
        if part < QUERY_PARTS:
            head = part * BLOCK + tl.arange(0, BLOCK)
            at = head[:, None] * HEAD + lane[None, :]
            mask = (head < QUERY_HEADS)[:, None] & (lane < HALF)[None, :]
            x = q + row * q_stride + at
            first, second = rotated_halves(
                x, query_norm, c, s, lane, mask, HALF, FORM.NORM, FORM.EPS_BITS
            )
            to = out + row * (QUERY_HEADS * HEAD) + at
            tl.store(to, first.to(out.dtype.element_ty), mask=mask)
            tl.store(to + HALF, second.to(out.dtype.element_ty), mask=mask)
        # 3. Rotate keys and store them in their page.
        else:
            slot = tl.load(slots + row)
            head = (part - QUERY_PARTS) * BLOCK + tl.arange(0, BLOCK)
            mask = (head < KEY_HEADS)[:, None] & (lane < HALF)[None, :]
            x = k + row * k_stride + head[:, None] * HEAD + lane[None, :]
            first, second = rotated_halves(
                x, key_norm, c, s, lane, mask, HALF, FORM.NORM, FORM.EPS_BITS
            )
            page = k_pages + (slot // _PAGE) * (KEY_HEADS * SIZE) + head * SIZE
            key_at = page[:, None] + (slot % _PAGE) * HEAD + lane[None, :]
            if FP8:
                first = first.to(k.dtype.element_ty).to(tl.float32)
                second = second.to(k.dtype.element_ty).to(tl.float32)
                larger = tl.maximum(largest_bits(first, mask), largest_bits(second, mask))
                own = v + row * v_stride + head[:, None] * HEAD + lane[None, :]
                low = tl.load(own, mask=mask, other=0.0).to(tl.float32)
                high = tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)
                of_value = tl.maximum(largest_bits(low, mask), largest_bits(high, mask))
                largest = key_bits(tl.max(larger, 1), tl.max(of_value, 1))
                exponent = exponent_of(largest, LEAST)
                tl.store(key_at, codes_of(first, largest[:, None], exponent[:, None]), mask=mask)
                codes = codes_of(second, largest[:, None], exponent[:, None])
                tl.store(key_at + HALF, codes, mask=mask)
                byte_at = page + _PAGE * HEAD + slot % _PAGE
                tl.store(byte_at, exponent_byte(largest, exponent), mask=head < KEY_HEADS)
            else:
                tl.store(key_at, first.to(k_pages.dtype.element_ty), mask=mask)
                tl.store(key_at + HALF, second.to(k_pages.dtype.element_ty), mask=mask)
    # 4. Store values in their page.
    else:
        slot = tl.load(slots + row)
        whole = tl.arange(0, 2 * LANES)
        head = (part - QUERY_PARTS - KEY_PARTS) * BLOCK + tl.arange(0, BLOCK)
        present = (head < KEY_HEADS)[:, None] & (whole < HEAD)[None, :]
        value = tl.load(v + row * v_stride + head[:, None] * HEAD + whole[None, :], mask=present)
        page = v_pages + (slot // _PAGE) * (KEY_HEADS * SIZE) + head * SIZE
        row_at = page[:, None] + (slot % _PAGE) * HEAD + whole[None, :]
        if FP8:
            value = value.to(tl.float32)
            largest = tl.max(largest_bits(value, present), 1)
            exponent = exponent_of(largest, LEAST)
            row_codes = codes_of(value, largest[:, None], exponent[:, None])
            tl.store(row_at, row_codes, mask=present)
            byte_at = page + _PAGE * HEAD + slot % _PAGE
            byte = value_exponent_byte(largest, exponent, LEAST)
            tl.store(byte_at, byte, mask=head < KEY_HEADS)
        else:
            tl.store(row_at, value, mask=present)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    pages: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
) -> torch.Tensor:
    """q [M, Hq, D] rotated; k rotated and v [M, Hkv, D] stored to pages, in fp8 if these are uint8.

    Tables [positions, D / 2] fp32; norms [D] or None, both alike. Rows of q, k and v may lie apart
    (parts of a wider product). Raises ValueError for another layout.
    """
    return rotate_and_store_as(q, k, v, tables, norms, eps, pages, batch, share(q.shape[0]))


def rotate_and_store_as(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    pages: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
    share: HeadShare,
) -> torch.Tensor:
    """`rotate_and_store`, shared out as given: only the speed differs."""
    rows, query_heads, head = q.shape
    key_heads = pages[0].shape[1]
    _check((q, k, v), tables, norms, pages, batch)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    form = _form(query_heads, key_heads, head, norms[0] is not None, eps, share.heads)
    parts = cdiv(query_heads, form.BLOCK) + 2 * cdiv(key_heads, form.BLOCK)
    rotate_and_store_heads[(rows, parts)](
        q,
        k,
        v,
        tuple(tables),
        tuple(q if norm is None else norm for norm in norms),
        batch.positions,
        batch.slots,
        out,
        tuple(pages),
        (q.stride(0), k.stride(0), v.stride(0)),
        form,
        num_warps=share.warps,
        enable_fp_fusion=False,
        **dependent_launch(q.device),
    )
    return out


@cache
def _form(
    query_heads: int, key_heads: int, head: int, normed: bool, eps: float, block: int
) -> RotationForm:
    """The form of programs of `block` heads at most."""
    half, heads = head // 2, min(block, next_power_of_2(query_heads))
    lanes, bits = next_power_of_2(half), eps_bits(eps)
    return RotationForm(query_heads, key_heads, half, lanes, normed, bits, heads)


def _check(
    parts: tuple[torch.Tensor, ...],
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    pages: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
) -> None:
    rows, head = parts[0].shape[0], parts[0].shape[2]
    if batch.slots.shape[0] != rows:
        raise ValueError(f"{rows} rows but {batch.slots.shape[0]} places to store them")
    for x in parts:
        if x.shape[0] != rows or x.stride(2) != 1 or x.stride(1) != head:
            raise ValueError(f"{tuple(x.shape)} {x.stride()}: a row's heads must be contiguous")
    if any(not x.is_contiguous() for x in (*tables, *pages)):
        raise ValueError("the tables and the pages must be contiguous")
    if any(table.shape[1] * 2 != head for table in tables):
        raise ValueError(f"tables of {tables[0].shape[1]} angles for heads of {head}")
    if (norms[0] is None) != (norms[1] is None):
        raise ValueError("queries and keys are normed both or neither")
