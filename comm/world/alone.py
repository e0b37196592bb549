"""Stand-ins for a world's tensor operations while a rank runs without its peers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Alone:
    """True inside `while_inside`; its operations return zeros in the shapes of the real ones."""

    def __init__(self, size: int, beside: "Alone | None" = None) -> None:
        """beside: another world of this rank; both are alone at the same time."""
        self._size = size
        self._inside: list[bool] = [False] if beside is None else beside._inside

    def __bool__(self) -> bool:
        return self._inside[0]

    @contextmanager
    def while_inside(self) -> Iterator[None]:
        """Return zeros in place of the peers' tensors."""
        self._inside[0] = True
        try:
            yield
        finally:
            self._inside[0] = False

    def all_gather(self, x: Tensor) -> Tensor:
        """Zeros [size, *x.shape]."""
        return x.new_zeros((self._size, *x.shape))

    def all_to_all(self, x: Tensor) -> Tensor:
        """Zeros of x's shape, contiguous."""
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
