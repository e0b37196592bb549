"""The sort key: the total order of a row's ids (value descending, id ascending) as one integer.

    bits      = int32 bits of x, both zeros as +0.0
    value key = bits ^ ((bits >> 31) & 0x7fffffff)        int32, monotone in x; -inf is the least
    sort key  = value key * 2^22 + (2^22 - 1 - id)        int64, another for each id of a row

The largest sort key is the likeliest id, and of ties the lowest one. So a maximum of integers
settles both, in any layout. Limits: fp32 without NaN, ids below 2^22.

    R  rows          W  columns of this rank          count  keys asked for, best first
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.exact.thresholds import FLOAT32_MAX

ID_BITS = 22
LARGEST_ID = (1 << ID_BITS) - 1

VALUE_SHIFT = tl.constexpr(ID_BITS)
KEYS_PER_VALUE = tl.constexpr(1 << ID_BITS)
LAST_ID = tl.constexpr(LARGEST_ID)
SIGN_AND = tl.constexpr(0x7FFFFFFF)
"""The bits that are flipped in a negative float, so that its integer grows with it."""
MOST_VALUE_KEY = tl.constexpr((1 << 31) - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)
"""The value key of +inf."""
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
"""The value key of -inf."""
FLOAT32_MOST = tl.constexpr(FLOAT32_MAX)

ABOVE_ALL = tl.constexpr(1 << 62)
"""A sort key above that of every id."""
BELOW_ALL = tl.constexpr(-(1 << 62))
"""A sort key below that of every id: of what is not there."""
KEEPS_ALL = tl.constexpr(-(1 << 31 << ID_BITS))
"""The bound that cuts off no id: no value key is smaller than -2^31."""

_SPAN = 8192
_BLOCK = 2048


@triton.jit
def flipped(ids):
    """LAST_ID - ids, and back: of equal values the lower id has the larger sort key."""
    return tl.full((), LAST_ID, tl.int64) - ids


@triton.jit
def value_key_of(key):
    """The value key in a sort key, int64."""
    return key >> VALUE_SHIFT


@triton.jit
def sort_key(x, ids):
    """int64 sort keys of fp32 values x of vocabulary ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    value_key = (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.int64)
    return value_key * KEYS_PER_VALUE + flipped(ids.to(tl.int64))


@triton.jit
def least_key(value):
    """The sort key below those of all ids with an fp32 value, above those of smaller values."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.int64) * KEYS_PER_VALUE


@triton.jit
def value_of(key):
    """The fp32 value in a sort key, zeros as +0.0."""
    bits = (key >> VALUE_SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """The id in a sort key, int32."""
    return flipped(key & LAST_ID).to(tl.int32)


@triton.jit
def token_of(key):
    """The id in a sort key; -1 where its value is -inf or there is none."""
    return tl.where((key >> VALUE_SHIFT) > MINUS_INFINITY_KEY, flipped(key & LAST_ID), -1)


@triton.jit(do_not_specialize=["count"])  # a request chooses it: nothing compiles while serving
def top_of_parts(values, tops, vocabulary, stride, count, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """tops[row, part, i]: the `count` largest sort keys of SPAN ids; program (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = values + row.to(tl.int64) * stride
    out = tops + (row * tl.num_programs(1) + part).to(tl.int64) * count
    nothing = tl.full((BLOCK,), BELOW_ALL, tl.int64)
    previous = tl.full((), ABOVE_ALL, tl.int64)
    for rank in range(count):
        best = nothing
        for first in range(0, SPAN, BLOCK):
            ids = part * SPAN + first + tl.arange(0, BLOCK)
            x = tl.load(start + ids, mask=ids < vocabulary, other=0.0)
            key = sort_key(x, ids)
            best = tl.maximum(best, tl.where((ids < vocabulary) & (key < previous), key, nothing))
        previous = tl.max(best, axis=0)
        tl.store(out + rank, previous)


def top_keys(rows: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """Sort keys of the `count` largest of rows fp32 [R, W], best first: int64 [R, count].

    Columns are the ids from `first_id`. What a row does not have is below every sort key.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    height, vocabulary = rows.shape
    parts = max(1, cdiv(vocabulary, _SPAN))
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


def ids_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """The ids in sort keys, int64."""
    return LARGEST_ID - (keys & LARGEST_ID)


def values_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """The values in sort keys, fp32, zeros as +0.0."""
    bits = (keys >> ID_BITS).to(torch.int32)
    return (bits ^ ((bits >> 31) & SIGN_AND.value)).view(torch.float32)
