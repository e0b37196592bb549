"""Log-probabilities from an integer softmax mass, on the GPU.

    m     = max(x)
    q_i   = round_half_even(exp2((x_i - m) * fp32(log2 e)) * 2^40)         fp32, then fp64 to int64
    mass  = q_0 + q_1 + ...                                                int64: any order
    log p_i = fp32( (fp64(x_i) - fp64(m)) - log(fp64(mass) * 2^-40) )

Rounding to an integer is an addition of 1.5 * 2^52 in fp64, after which the integer stands in the
low bits (magnitudes < 2^51).

    x  fp32 logits of any shape
"""

import triton
import triton.language as tl

from tpdet.kernels.order import MASS_BITS

LOG2_E = tl.constexpr(1.4426950408889634)
MASS_UNIT = tl.constexpr(2.0**-MASS_BITS)
_MASSES_OF_ONE = tl.constexpr(2.0**MASS_BITS)
ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds to an integer, ties even
ROUNDER_BITS = tl.constexpr(0x4338000000000000)  # the bits of the same number


@triton.jit
def fixed_point(x, maximum):
    """int64 mass of fp32 logits x against their finite maximum; -inf has none."""
    weight = tl.exp2((x - maximum) * LOG2_E)
    scaled = weight.to(tl.float64) * _MASSES_OF_ONE
    return (scaled + ROUNDER).to(tl.int64, bitcast=True) - ROUNDER_BITS
