"""The total order of a row's ids (value descending, id ascending) as one integer, and its top.

    bits  = int32 bits of x, both zeros as +0.0
    key   = bits ^ ((bits >> 31) & 0x7fffffff)            int32, monotone in x; -inf is the smallest
    order = key * 2^22 + (2^22 - 1 - id)                  int64, no two ids of a row alike

The largest order is the likeliest id, the lowest one on ties, so a maximum of integers settles
both, in any layout. Limits: fp32 without NaN, ids below 2^22.
"""

import torch
import triton
import triton.language as tl

ID_BITS = 22
NOTHING = -(1 << 62)
"""An order below that of every id."""
LEAST_KEY = -0x7F800001
"""The key of -inf."""

_SPAN = 8192
_BLOCK = 2048


@triton.jit
def order_of(x, ids):
    """int64 order of fp32 values x of vocabulary ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return key * 4194304 + (4194303 - ids.to(tl.int64))


@triton.jit(do_not_specialize=["count"])  # a request chooses it: nothing compiles while serving
def top_of_parts(values, tops, vocabulary, stride, count, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """tops[row, part, place]: the `count` largest orders of SPAN ids; program (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = values + row.to(tl.int64) * stride
    out = tops + (row * tl.num_programs(1) + part).to(tl.int64) * count
    nothing = tl.full((BLOCK,), -4611686018427387904, tl.int64)
    previous = tl.full((), 4611686018427387904, tl.int64)
    for place in range(count):
        best = nothing
        for first in range(0, SPAN, BLOCK):
            ids = part * SPAN + first + tl.arange(0, BLOCK)
            x = tl.load(start + ids, mask=ids < vocabulary, other=0.0)
            order = order_of(x, ids)
            best = tl.maximum(
                best, tl.where((ids < vocabulary) & (order < previous), order, nothing)
            )
        previous = tl.max(best, axis=0)
        tl.store(out + place, previous)


def top_orders(rows: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """Orders of the `count` largest of rows fp32 [R, W], best first: int64 [R, count].

    Columns are the ids from `first_id`. What a row does not have is below every order.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    height, vocabulary = rows.shape
    parts = max(1, triton.cdiv(vocabulary, _SPAN))
    tops = torch.empty(height, parts, count, dtype=torch.int64, device=rows.device)
    top_of_parts[height, parts](
        rows,
        tops,
        vocabulary,
        rows.stride(0),
        count,
        _SPAN,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    best = torch.sort(tops.view(height, -1), dim=-1, descending=True, stable=True).values
    return best[:, :count] - first_id


def id_of(order: torch.Tensor) -> torch.Tensor:
    """The id in an order, int64."""
    last = (1 << ID_BITS) - 1
    return last - (order & last)
