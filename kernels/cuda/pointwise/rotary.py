"""Query-key norm and rotary embedding on a GPU: the CPU's bits. fp32, no fma, one rounding.

first'  = first * cos - second * sin
second' = second * cos + first * sin          (halves of a head, as Hugging Face pairs them)

The norm before it is `norm.reciprocal_root` over a head, whatever the number of heads a rank holds.

Shapes: M rows, heads of D values, HALF = D / 2. x [M, heads, D]; cos, sin [M, HALF] fp32.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.norm import eps_bits, reciprocal_root

_HEADS = 8  # heads of a program, at most


@triton.jit
def rotated_halves(
    x,
    norm_weight,
    cos,
    sin,
    lane,
    mask,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    EPS_BITS: tl.constexpr,
):
    """Both halves in fp32 of the heads at x [B, LANES] (their first), cos and sin [LANES].

    The halves are joined for the norm: its largest and its integer sum know no order.
    """
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        whole = tl.reshape(tl.join(first, second), (x.shape[0], 2 * x.shape[1]))
        root = reciprocal_root(whole, 2 * HALF, EPS_BITS)
        low = tl.load(norm_weight + lane, mask=lane < HALF, other=0.0).to(tl.float32)
        high = tl.load(norm_weight + lane + HALF, mask=lane < HALF, other=0.0).to(tl.float32)
        first = (first * root[:, None]) * low[None, :]
        second = (second * root[:, None]) * high[None, :]
    c, s = cos[None, :], sin[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    norm_weight,
    out,
    x_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    NORM: tl.constexpr,
    EPS_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: M rows x blocks of heads. x [M, heads, D] with row stride x_stride, out contiguous."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    mask = (head < HEADS)[:, None] & (lane < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + lane[None, :]
    c = tl.load(cos + row * HALF + lane, mask=lane < HALF, other=0.0)
    s = tl.load(sin + row * HALF + lane, mask=lane < HALF, other=0.0)
    x_at = x + row * x_stride + at
    first, second = rotated_halves(x_at, norm_weight, c, s, lane, mask, HALF, NORM, EPS_BITS)
    to = out + row * (HEADS * 2 * HALF) + at
    dtype = out.dtype.element_ty
    tl.store(to, first.to(dtype), mask=mask)
    tl.store(to + HALF, second.to(dtype), mask=mask)


def rotate_heads(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """x [M, heads, D], cos and sin [M, D / 2] fp32, norm_weight [D] or None -> [M, heads, D].

    Rows of x may lie apart (a part of a wider product); their heads may not. Raises ValueError for
    another layout.
    """
    rows, heads, head = x.shape
    if x.stride(2) != 1 or x.stride(1) != head:
        raise ValueError(f"strides {x.stride()}: the heads of a row must be contiguous")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block = min(_HEADS, next_power_of_2(heads))
    _rotate[(rows, cdiv(heads, block))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        x if norm_weight is None else norm_weight,
        out,
        x.stride(0),
        HEADS=heads,
        HALF=head // 2,
        LANES=next_power_of_2(head // 2),
        NORM=norm_weight is not None,
        EPS_BITS=eps_bits(eps),
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
    return out
