"""A norm as one value: what an operation or an exchange applies to the residual stream."""

from dataclasses import dataclass

import torch

KINDS = ("rms",)
"""rms: y = round((x * r) * weight) with r = 1 / sqrt(mean of squares + eps)."""


@dataclass(frozen=True, eq=False)
class Norm:
    """weight [N] in the dtype of the normed rows; eps is added to the mean of squares.

    kind: of KINDS. The residual stream that it reads is fp32, whatever that dtype is.

    Raises ValueError for another kind: no kernel asks for it again.
    """

    weight: torch.Tensor
    eps: float
    kind: str = "rms"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"norm {self.kind!r}: use one of {', '.join(KINDS)}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the normed rows: the model's."""
        return self.weight.dtype
