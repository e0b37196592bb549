"""Whether weights hold NaN or infinity, found by their bits or by their values."""

import numpy as np
import torch

_FORMS = {
    torch.float32: (np.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
}
"""By dtype: integers of its width, signed and not, and the bits of infinity."""


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: both extremes show it, in one pass without a copy."""
    if not values.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))


def bits_finite(raw: np.ndarray, dtype: torch.dtype) -> bool:
    """The same of bytes [B] of fp32, bf16 or fp16; in fewer calls, for many threads.

    Bits from infinity on are no finite number's: as signed integers they are the largest of what is
    positive, as unsigned ones, with the sign, the largest of all.
    """
    if not raw.size:
        return True
    signed, unsigned, infinity = _FORMS[dtype]
    sign = 1 << (8 * dtype.itemsize - 1)
    return bool(raw.view(signed).max() < infinity and raw.view(unsigned).max() < sign + infinity)
