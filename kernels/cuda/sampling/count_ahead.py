"""How many ids of a row come before a given one: larger logits, and equal ones with a lower id.

A program counts in one part of a row. The parts are added as integers, so how they are added is
free.

    logits  fp32 [R, W], rows `stride` apart     parts  int32 [R, parts]
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.sizes import cdiv

_SPAN = 8192
_BLOCK = 2048


@triton.jit(do_not_specialize=["width"])
def count_parts(logits, chosen, at, parts, width, stride, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """parts[row, part]: how many of SPAN columns come before column at[row]; program (row, part).

    chosen[row] is that column's logit; it need not be among these columns, nor at[row] among ids.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    mark, column = tl.load(chosen + row), tl.load(at + row)
    start = logits + row.to(tl.int64) * stride
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SPAN, BLOCK):
        ids = part * SPAN + first + tl.arange(0, BLOCK)
        x = tl.load(start + ids, mask=ids < width, other=float("nan"))
        count += ((x > mark) | ((x == mark) & (ids < column))).to(tl.int32)
    tl.store(parts + row * tl.num_programs(1) + part, tl.sum(count, axis=0))


def count_ahead(
    logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor, width: int
) -> torch.Tensor:
    """Of the first `width` columns of fp32 [R, W]: int64 [R]; chosen fp32 [R], at int64 [R]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, columns = len(logits), max(1, cdiv(width, _SPAN))
    parts = torch.empty(rows, columns, dtype=torch.int32, device=logits.device)
    count_parts[rows, columns](
        logits,
        chosen.contiguous(),
        at.contiguous(),
        parts,
        width,
        logits.stride(0),
        _SPAN,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return parts.sum(-1)
