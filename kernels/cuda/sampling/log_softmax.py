"""Log-probabilities from an integer softmax mass, on the GPU.

    m     = max(x)
    q_i   = round_half_even(exp2((x_i - m) * fp32(log2 e)) * 2^40)         fp32, then fp64 to int64
    mass  = q_0 + q_1 + ...                                                int64: any order
    log p_i = fp32( (fp64(x_i) - fp64(m)) - log(fp64(mass) * 2^-40) )

Rounding to an integer is an addition of 1.5 * 2^52 in fp64, after which the integer stands in the
low bits (magnitudes < 2^51).
"""

import triton
import triton.language as tl


@triton.jit
def fixed_point(x, maximum):
    """int64 mass of fp32 logits x against their finite maximum; -inf has none."""
    weight = tl.exp2((x - maximum) * 1.4426950408889634)
    scaled = weight.to(tl.float64) * 1099511627776.0
    return (scaled + 6755399441055744.0).to(tl.int64, bitcast=True) - 4843621399236968448
