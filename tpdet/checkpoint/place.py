"""Puts read weights into place: on a reload, into the memory of the old weights."""

import torch

from tpdet.errors import IntegrityError


def place(held: torch.Tensor | None, read: torch.Tensor) -> torch.Tensor:
    """The tensor to use: `read` itself at first (held is None), later `held` with its values.

    The address stays because CUDA graphs contain the addresses of weights, and peers those of the
    parts of a vocabulary. Raises IntegrityError for another shape or dtype, before writing.
    """
    if held is None:
        return read
    _check(held, tuple(read.shape), read.dtype)
    return held.copy_(read)


def memory_for(
    held: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for weights to be read into: `held`, or new memory on `device` at first.

    Raises as `place`.
    """
    if held is None:
        return torch.empty(shape, dtype=dtype, device=device)
    _check(held, shape, dtype)
    return held


def _check(held: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(held.shape) != shape or held.dtype != dtype:
        raise IntegrityError(
            f"weights of shape {list(shape)} and {dtype} cannot take the place of "
            f"{list(held.shape)} and {held.dtype}: restart the server on them"
        )
