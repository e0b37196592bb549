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
    if held.shape != read.shape or held.dtype != read.dtype:
        raise IntegrityError(
            f"weights of shape {list(read.shape)} and {read.dtype} cannot take the place of "
            f"{list(held.shape)} and {held.dtype}: restart the server on them"
        )
    return held.copy_(read)
