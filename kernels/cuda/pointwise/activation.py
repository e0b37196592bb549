"""SiLU-and-multiply: y = round((g / (1 + exp2(-g * log2 e))) * u), fp32, division IEEE-rounded.

Shapes: M rows, I values of a row. gate_up [M, 2 * I], gate first; y [M, I].
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 1024


@triton.jit
def silu(gate):
    """g / (1 + exp2(-g * log2 e)) in fp32."""
    return tl.div_rn(gate, 1.0 + tl.exp2((0.0 - gate) * _LOG2_E))


@triton.jit
def silu_multiply_rows(gate_up, y, width, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One block of one row."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    gate = tl.load(gate_up + row * stride + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (silu(gate) * up).to(y.dtype.element_ty), mask=here)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2 * I], gate first -> [M, I] in the same dtype, rounded once."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(m, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        silu_multiply_rows[(m, triton.cdiv(width, _BLOCK))](
            gate_up,
            y,
            width,
            gate_up.stride(0),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y
