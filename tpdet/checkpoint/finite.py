"""Whether weights hold NaN or infinity, found by their bits or by their values."""

from collections.abc import Sequence

import numpy as np
import torch

_FORMS = {
    torch.float32: (np.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
}
"""By dtype: integers of its width, signed and not, and the bits of infinity."""


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, without a copy; by its bits where they can be seen."""
    if not values.numel():
        return True
    if values.device.type == "cpu" and values.is_contiguous() and values.dtype in _FORMS:
        return bits_finite(values.view(-1).view(torch.uint8).numpy(), values.dtype)
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))


def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of the first tensor with NaN or infinity; a device is waited for once."""
    filled = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.numel()]
    if not filled:
        return None
    extremes = torch.stack([torch.stack(torch.aminmax(tensor)).float() for _, tensor in filled])
    sound = torch.isfinite(extremes).all(1).tolist()
    return next((i for (i, _), good in zip(filled, sound, strict=True) if not good), None)


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
