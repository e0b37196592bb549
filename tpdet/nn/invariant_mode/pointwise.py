"""Functions of one element, in whole vectors: on a CPU the last elements are no exception.

PyTorch computes a loop's last elements, and its strided ones, with scalar code, whose bits differ
from those of its vector code (sigmoid, SiLU, softplus and the tanh form of GELU in fp32, rsqrt in
bf16). So what an element becomes depends on how many there are. Here a loop runs over contiguous
memory, is filled up with ones to a multiple of 64 elements and has one thread: only vector code is
left, whose lanes are alike. A GPU computes each element by one program and needs nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_VECTORS = 64  # a multiple of two vectors of every type on every instruction set


def in_whole_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of tensors of one shape; the result has that shape and the first one's layout."""
    first = tensors[0]
    if first.device.type != "cpu" or not first.numel():
        return function(*tensors)
    buffers = [torch.empty_like(first, dtype=x.dtype).copy_(x) for x in tensors]
    flat = [_filled(buffer.as_strided((buffer.numel(),), (1,))) for buffer in buffers]
    whole = function(*flat)
    return whole[: first.numel()].as_strided(first.shape, buffers[0].stride())


def exponential(x: Tensor) -> Tensor:
    """exp(x) in whole vectors."""
    return in_whole_vectors(torch.ops.aten.exp.default, x)


def logarithm(x: Tensor) -> Tensor:
    """log(x) in whole vectors."""
    return in_whole_vectors(torch.ops.aten.log.default, x)


def _filled(flat: Tensor) -> Tensor:
    missing = -flat.numel() % _VECTORS
    return torch.cat([flat, flat.new_ones(missing)]) if missing else flat
