"""The epilogue of gated products: gates and ups joined before anything is rounded.

    ROWS, COLUMNS  rows and weight rows of a tile; COLUMNS is a multiple of 16
    total          fp32 [ROWS, COLUMNS], interleaved by eights

    silu, gelu_tanh   act(g) * u, as in `pointwise/activation.py`
    clamped           (u' + 1) * (g' / (1 + exp2(-(g' * 1.702) * log2 e))), g' = min(g, 7) and
                      u' = min(max(u, -7), 7), by select: NaN stays NaN (experts of gpt-oss)

The layout (`kernels/inputs/gated.py`) puts a gate and its up into one thread, so nothing moves
between threads.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.activation import LOG2_E, activate
from tpdet.kernels.inputs.activations import (
    CLAMP_LIMIT,
    CLAMP_STEEPNESS,
    CLAMPED,
    EXPERT_ACTIVATIONS,
)
from tpdet.kernels.inputs.gated import GROUP

_GROUP = tl.constexpr(GROUP)
_CLAMPED = tl.constexpr(EXPERT_ACTIVATIONS[CLAMPED])
_LIMIT = tl.constexpr(CLAMP_LIMIT)
_STEEPNESS = tl.constexpr(CLAMP_STEEPNESS)


@triton.jit
def join(gate, up, ACTIVATION: tl.constexpr):
    """fp32 gate and up, of one shape -> fp32. ACTIVATION: a number of `EXPERT_ACTIVATIONS`."""
    if ACTIVATION == _CLAMPED:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < 0.0 - _LIMIT, 0.0 - _LIMIT, up))
        steep = gate * _STEEPNESS
        joined = (up + 1.0) * (gate / (1.0 + tl.exp2((0.0 - steep) * LOG2_E)))
    else:
        joined = activate(gate, ACTIVATION) * up
    return joined


@triton.jit
def gated_columns(total, ACTIVATION: tl.constexpr):
    """[ROWS, COLUMNS] -> gates joined with ups [ROWS, COLUMNS // 2]."""
    ROWS: tl.constexpr = total.shape[0]
    PAIRS: tl.constexpr = total.shape[1] // (2 * _GROUP)
    apart = tl.permute(tl.reshape(total, (ROWS, PAIRS, 2, _GROUP)), (0, 1, 3, 2))
    gate, up = tl.split(apart)
    return tl.reshape(join(gate, up, ACTIVATION), (ROWS, PAIRS * _GROUP))
