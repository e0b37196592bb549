"""Where read weights end up: on a reload in the memory that the old ones have."""

import torch

from tpdet.errors import IntegrityError


def place(held: torch.Tensor | None, read: torch.Tensor) -> torch.Tensor:
    """`read` itself the first time; later `held`, overwritten with it, at the address it had.

    CUDA graphs hold the addresses of weights, and peers those of a vocabulary's parts. Raises
    IntegrityError for another shape or dtype, before anything is written.
    """
    if held is None:
        return read
    if held.shape != read.shape or held.dtype != read.dtype:
        raise IntegrityError(
            f"weights of shape {list(read.shape)} and {read.dtype} cannot take the place of "
            f"{list(held.shape)} and {held.dtype}: restart the server on them"
        )
    return held.copy_(read)
