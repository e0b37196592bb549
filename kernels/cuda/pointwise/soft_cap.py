"""Soft-caps of scores and logits: cap * tanh(x / cap) in fp32, by one exponential.

    y = ((E - 1) / (E + 1)) * cap,   E = exp2(min(x * rate, 60))

rate is fp32(2 * log2 e / cap), times the score scale of attention; from 60 on the quotient is
exactly 1. The division is that of `activation.py`. NaN stays NaN.

Shapes: R rows, W values of a row. x [R, W] fp32, whose rows are contiguous.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.activations import LOG2_E, cap_rate

_SATURATED = tl.constexpr(60.0)
_BLOCK = 1024


class SoftCap(NamedTuple):
    """What a kernel is compiled for: rate, as above, and the cap."""

    rate: float
    limit: float


def soft_cap_of(cap: float, scale: float = 1.0) -> SoftCap | None:
    """The cap of values that are times `scale` when they are capped; None for no cap (0)."""
    return SoftCap(cap_rate(cap, scale * LOG2_E), cap) if cap else None


@triton.jit
def capped(x, CAP: tl.constexpr):
    """fp32 of any shape; CAP: a SoftCap."""
    scaled = x * CAP.rate
    power = tl.exp2(tl.where(scaled > _SATURATED, _SATURATED, scaled))
    return ((power - 1.0) / (power + 1.0)) * CAP.limit


@triton.jit
def cap_values(x, count, CAP: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """x [count] in place."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    tl.store(x + at, capped(tl.load(x + at, mask=here, other=0.0), CAP), mask=here)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x [...] fp32, contiguous, in place."""
    if not x.is_contiguous():
        raise ValueError(f"strides {x.stride()}: values to cap must be contiguous")
    if x.numel():
        cap_values[(cdiv(x.numel(), _BLOCK),)](
            x,
            x.numel(),
            CAP=soft_cap_of(cap),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(x.device),
        )
    return x
