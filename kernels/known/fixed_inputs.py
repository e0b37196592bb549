"""Inputs of known answers, equal everywhere, and the bytes of what is made of them."""

import torch

from tpdet.kernels.exact.philox import philox_words


def fixed_values(
    seed: int, number: int, shape: tuple[int, ...], device: torch.device | None = None
) -> torch.Tensor:
    """fp32 in [-1, 1), multiples of 2^-15, the same on every device; another for each number."""
    count = int(torch.Size(shape).numel())
    words = philox_words(torch.arange(count, device=device), seed=seed, position=number, choice=0)
    return (((words >> 16) - (1 << 15)).float() * 2.0**-15).view(shape)


def raw_bytes(x: torch.Tensor) -> bytes:
    """The bytes of a tensor's values, in order."""
    return x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
