"""The likeliest ids of a row, and how many ids come before a given one: larger logits, and equal
ones with a lower id.

A program takes one part of a row. What the parts say is sorted as sort keys (`table.py`), or added
as integers: how they are combined is free.

    R  rows          W  columns of this rank          count  keys asked for, best first
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BELOW_ALL,
    ID_BITS,
    LARGEST_ID,
    SIGN_AND,
    sort_key,
)

_SPAN = tl.constexpr(8192)
_BLOCK = tl.constexpr(2048)  # columns of a span that are read at a time


@triton.jit(do_not_specialize=["count"])  # a request chooses it: nothing compiles while serving
def top_of_parts(values, tops, vocabulary, stride, count):
    """tops[row, part, i]: the `count` largest sort keys of _SPAN ids; program (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = values + row.to(tl.int64) * stride
    out = tops + (row * tl.num_programs(1) + part).to(tl.int64) * count
    nothing = tl.full((_BLOCK,), BELOW_ALL, tl.int64)
    previous = tl.full((), ABOVE_ALL, tl.int64)
    for rank in range(count):
        best = nothing
        for first in range(0, _SPAN, _BLOCK):
            ids = part * _SPAN + first + tl.arange(0, _BLOCK)
            x = tl.load(start + ids, mask=ids < vocabulary, other=0.0)
            key = sort_key(x, ids)
            best = tl.maximum(best, tl.where((ids < vocabulary) & (key < previous), key, nothing))
        previous = tl.max(best, axis=0)
        tl.store(out + rank, previous)


@triton.jit(do_not_specialize=["width"])
def count_parts(logits, chosen, at, parts, width, stride):
    """parts[row, part]: how many of _SPAN columns come before column at[row]; program (row, part).

    chosen[row] is that column's logit; it need not be among these columns, nor at[row] among ids.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    mark, column = tl.load(chosen + row), tl.load(at + row)
    start = logits + row.to(tl.int64) * stride
    count = tl.zeros((_BLOCK,), tl.int32)
    for first in range(0, _SPAN, _BLOCK):
        ids = part * _SPAN + first + tl.arange(0, _BLOCK)
        x = tl.load(start + ids, mask=ids < width, other=float("nan"))
        count += ((x > mark) | ((x == mark) & (ids < column))).to(tl.int32)
    tl.store(parts + row * tl.num_programs(1) + part, tl.sum(count, axis=0))


def top_keys(rows: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """Sort keys of the `count` largest of rows fp32 [R, W], best first: int64 [R, count].

    Columns are the ids from `first_id`. What a row does not have is below every sort key.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    height, vocabulary = rows.shape
    parts = max(1, cdiv(vocabulary, _SPAN.value))
    tops = torch.empty(height, parts, count, dtype=torch.int64, device=rows.device)
    top_of_parts[height, parts](
        rows, tops, vocabulary, rows.stride(0), count, num_warps=4, enable_fp_fusion=False
    )
    best = torch.sort(tops.view(height, -1), dim=-1, descending=True, stable=True).values
    return best[:, :count] - first_id


def ids_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """The ids in sort keys, int64."""
    return LARGEST_ID - (keys & LARGEST_ID)


def values_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """The values in sort keys, fp32, zeros as +0.0."""
    bits = (keys >> ID_BITS).to(torch.int32)
    return (bits ^ ((bits >> 31) & SIGN_AND.value)).view(torch.float32)


def count_ahead(
    logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor, width: int
) -> torch.Tensor:
    """Ids ahead of each row's chosen one, int64 [R], in the first `width` columns of fp32 [R, W].

    chosen: fp32 [R]; at: its id, int64 [R]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, columns = len(logits), max(1, cdiv(width, _SPAN.value))
    parts = torch.empty(rows, columns, dtype=torch.int32, device=logits.device)
    of = chosen.contiguous(), at.contiguous(), parts, width, logits.stride(0)
    count_parts[rows, columns](logits, *of, num_warps=4, enable_fp_fusion=False)
    return parts.sum(-1)
