"""What joins an expert's gate and up, by name; the epilogues of all its kernels call it.

silu, gelu_tanh   act(g) * u, as in `pointwise/activation.py`
clamped           (u' + 1) * (g' / (1 + exp2(-(g' * 1.702) * log2 e))), g' = min(g, 7) and
                  u' = min(max(u, -7), 7), by select: NaN stays NaN (gpt-oss)
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.activation import LOG2_E, activate
from tpdet.kernels.inputs.activations import ACTIVATIONS, CLAMP_LIMIT, CLAMP_STEEPNESS

_SILU = tl.constexpr(ACTIVATIONS["silu"])
_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
_LIMIT = tl.constexpr(CLAMP_LIMIT)
_STEEPNESS = tl.constexpr(CLAMP_STEEPNESS)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """fp32 gate and up, of one shape -> fp32."""
    if ACTIVATION == "clamped":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < 0.0 - _LIMIT, 0.0 - _LIMIT, up))
        steep = gate * _STEEPNESS
        mixed = (up + 1.0) * (gate / (1.0 + tl.exp2((0.0 - steep) * LOG2_E)))
    elif ACTIVATION == "gelu_tanh":
        mixed = activate(gate, _GELU_TANH) * up
    else:
        mixed = activate(gate, _SILU) * up
    return mixed
