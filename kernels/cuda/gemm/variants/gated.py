"""The epilogue of gated products: activated gates times their ups, before anything is rounded.

    BM, BN    rows and weight rows of a tile; BN is a multiple of 16
    total     fp32 [BM, BN], interleaved by eights

The layout (`kernels/inputs/gated.py`) puts a gate and its up into one thread, so nothing moves
between threads. The expression is that of `pointwise/activation.py`.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.activation import activate
from tpdet.kernels.inputs.gated import GROUP

_GROUP = tl.constexpr(GROUP)


@triton.jit
def gated_columns(total, ACTIVATION: tl.constexpr):
    """[BM, BN] -> activated gate * up [BM, BN // 2]."""
    BM: tl.constexpr = total.shape[0]
    PAIRS: tl.constexpr = total.shape[1] // (2 * _GROUP)
    apart = tl.permute(tl.reshape(total, (BM, PAIRS, 2, _GROUP)), (0, 1, 3, 2))
    gate, up = tl.split(apart)
    return tl.reshape(activate(gate, ACTIVATION) * up, (BM, PAIRS * _GROUP))
