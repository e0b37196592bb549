"""Sigmoid gates on a GPU, s(g) = 1 / (1 + exp2(-g * log2 e)) in fp32, its division IEEE-rounded.

Of attention's heads: y = round(x * s(g)), a gate a value. Of shared experts: y = x * s(g) in fp32,
a gate a row.

Shapes: M rows, H heads of D values; L lanes of N values. x, gate, y [M, H, D]; sums [L, M, N] and
gate [M, 1] in fp32.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.pointwise.activation import LOG2_E

_BLOCK = 1024


@triton.jit
def opened(gate):
    """s(gate) in fp32, of any shape."""
    return tl.div_rn(1.0, 1.0 + tl.exp2((0.0 - gate.to(tl.float32)) * LOG2_E))


@triton.jit
def gate_values(x, gate, y, width, gate_stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid: M x parts of a row's `width` values; rows of gates are gate_stride apart."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    result = (value * opened(factor)).to(y.dtype.element_ty)
    tl.store(y + row * width + column, result, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_sums(sums, gate, y, rows, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid: L * M x parts of a row's `width` values; one of M gates for each."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(sums + row * width + column, mask=inside, other=0.0)
    factor = opened(tl.load(gate + row % rows))
    tl.store(y + row * width + column, value * factor, mask=inside)


def gate_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [M, H, D] -> round(x * s(gate)) [M, H, D] in x's dtype.

    Rows of gates may lie apart. Raises ValueError where another dimension does.
    """
    rows, heads, size = x.shape
    width = heads * size
    if not x.is_contiguous() or gate.stride()[1:] != (size, 1):
        raise ValueError(f"strides {x.stride()} and {gate.stride()}: a row must be contiguous")
    y = torch.empty_like(x)
    if y.numel():
        gate_values[(rows, cdiv(width, _BLOCK))](
            x,
            gate,
            y,
            width,
            gate.stride(0),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y


def gate_lanes(sums: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Sums [L, M, N], a row's gate [M, 1], both fp32 and contiguous -> sums * s(gate) in fp32."""
    lanes, rows, width = sums.shape
    if not sums.is_contiguous() or not gate.is_contiguous():
        raise ValueError(f"strides {sums.stride()} and {gate.stride()}: both must be contiguous")
    y = torch.empty_like(sums)
    if y.numel():
        gate_sums[(lanes * rows, cdiv(width, _BLOCK))](
            sums,
            gate,
            y,
            rows,
            width,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y
