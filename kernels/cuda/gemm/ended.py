"""The end of a chain that Triton would otherwise go on with."""

import triton
import triton.language as tl


@triton.jit
def ended(chain):
    """A chain's sum, which nothing goes on from.

    Triton makes x + dot(a, b, 0) into dot(a, b, x), one chain where two were written; it does not
    look through a change of type.
    """
    return chain.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
