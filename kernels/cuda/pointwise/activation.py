"""Activated gates times ups: y = round((g / (1 + exp2(-t * log2 e))) * u) in fp32.

    silu: t = g        gelu_tanh: t = g * (a + (g * g) * b)

The division is PTX's `div.full.f32`, a fixed sequence within 2 ulp. The IEEE division is a branch a
value, which takes a product's epilogue about 400 cycles each.

Shapes: M rows, I values of a row. gate_up [M, 2 * I] is interleaved as in
`kernels/inputs/gated.py`; y [M, I].
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.activations import ACTIVATIONS, GELU_CUBIC, GELU_LINEAR
from tpdet.kernels.inputs.gated import GROUP

LOG2_E = tl.constexpr(1.4426950408889634)
_GROUP = tl.constexpr(GROUP)
_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
_LINEAR = tl.constexpr(GELU_LINEAR)
_CUBIC = tl.constexpr(GELU_CUBIC)
_BLOCK = 1024


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """g / (1 + exp2(-t * log2 e)) in fp32, by the division that is no branch."""
    exponent = gate
    if ACTIVATION == _GELU_TANH:
        exponent = gate * (_LINEAR + (gate * gate) * _CUBIC)
    return gate / (1.0 + tl.exp2((0.0 - exponent) * LOG2_E))


@triton.jit
def activate_and_multiply_rows(
    gate_up,
    y,
    width,
    stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One block of one row."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    beside = gate_up + row * stride + at // _GROUP * (2 * _GROUP) + at % _GROUP
    gate = tl.load(beside, mask=here, other=0.0).to(tl.float32)
    up = tl.load(beside + _GROUP, mask=here, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + at, (activate(gate, ACTIVATION) * up).to(y.dtype.element_ty), mask=here
    )


@triton.jit
def activate_values(
    x, y, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """x [count] -> y [count]."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, ACTIVATION).to(y.dtype.element_ty), mask=at < count)


def activate_alone(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [M, I] -> [M, I] in x's dtype, rounded once; without a gate."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        activate_values[(cdiv(x.numel(), _BLOCK),)](
            x,
            y,
            x.numel(),
            ACTIVATION=ACTIVATIONS[activation],
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y


def activate_and_multiply(
    gate_up: torch.Tensor, dtype: torch.dtype | None = None, activation: str = "silu"
) -> torch.Tensor:
    """Interleaved gate_up [M, 2 * I] -> [M, I] in dtype (gate_up's), rounded once."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(m, width, dtype=dtype or gate_up.dtype, device=gate_up.device)
    if y.numel():
        activate_and_multiply_rows[(m, cdiv(width, _BLOCK))](
            gate_up,
            y,
            width,
            gate_up.stride(0),
            ACTIVATION=ACTIVATIONS[activation],
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y
