"""A shared expert's rows on their way to the lanes of a rank."""

from typing import NamedTuple

import torch


class SharedRows(NamedTuple):
    """What a shared expert adds to a rank's lanes, not yet multiplied.

    Leaf g of mixed [M, L * K] times down [L, N, K] is added to lane g, times the sigmoid of a row's
    gate, fp32 [M, 1] with rows anyhow apart, if it has one.
    """

    mixed: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None

    @staticmethod
    def joins(leaf: int, dtype: torch.dtype) -> bool:
        """Whether a GPU multiplies leaves of so many inputs where it adds up lanes."""
        return leaf in (16, 32, 64, 128) and dtype.itemsize == 2
