"""What joins an expert's gate and up, by name; the epilogues of all its kernels call it.

silu     silu(g) * u, as in `pointwise/activation.py`
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.activation import silu


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """fp32 gate and up, of one shape -> fp32."""
    return silu(gate) * up
