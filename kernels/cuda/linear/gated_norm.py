"""The norm of linear attention's outputs, a head at a time, times the SiLU of its gate, on a GPU.

    y = round(((o * r) * w) * silu(z))        fp32; r is a norm's, over the head's values

Shapes: M rows, Hv heads of N values; a program takes ROWS of the M * Hv.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.activation import activate
from tpdet.kernels.cuda.pointwise.norm import eps_bits, reciprocal_root
from tpdet.kernels.inputs.activations import ACTIVATIONS

_SILU = tl.constexpr(ACTIVATIONS["silu"])
_ROWS = 8


@triton.jit(do_not_specialize=["count"])
def norm_and_gate(
    o,
    z,
    weight,
    y,
    count,
    z_stride,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    EPS_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """o, y dense [count, N]; z's rows of HEADS * N values are z_stride apart."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count)[:, None] & (column < N)
    value = tl.load(o + row[:, None] * N + column, mask=mask, other=0.0).to(tl.float32)
    of_gate = (row // HEADS * z_stride + row % HEADS * N)[:, None] + column
    gate = tl.load(z + of_gate, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    normed = (value * reciprocal_root(value, N, EPS_BITS)[:, None]) * factor
    result = (normed * activate(gate, _SILU)).to(y.dtype.element_ty)
    tl.store(y + row[:, None] * N + column, result, mask=mask)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o, z [M, Hv, Dv], weight [Dv] -> [M, Hv, Dv] in z's dtype, rounded once."""
    rows, heads, size = o.shape
    z = z if z.stride(2) == 1 and z.stride(1) == size else z.contiguous()
    y = torch.empty(o.shape, dtype=z.dtype, device=o.device)
    if y.numel():
        norm_and_gate[(cdiv(rows * heads, _ROWS),)](
            o.contiguous(),
            z,
            weight,
            y,
            rows * heads,
            z.stride(0),
            HEADS=heads,
            N=size,
            EPS_BITS=eps_bits(eps),
            ROWS=_ROWS,
            BLOCK=next_power_of_2(size),
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return y
