"""A norm as one value: what an operation or an exchange applies to the residual stream."""

from dataclasses import dataclass

import torch

KINDS = ("rms", "rms_plus_one")
"""rms: y = round((x * r) * weight) with r = 1 / sqrt(mean of squares + eps).
rms_plus_one: the same of a checkpoint whose weight w stands for 1 + w; see `norm_weight`."""


@dataclass(frozen=True, eq=False)
class Norm:
    """weight [N] in the dtype of the normed rows, or in fp32; eps is added to the mean of squares.

    kind: of KINDS. rows: the dtype of the normed rows, the weight's if None. The residual stream
    that it reads is fp32, whatever that dtype is.

    Raises ValueError for another kind: no kernel asks for it again.
    """

    weight: torch.Tensor
    eps: float
    kind: str = "rms"
    rows: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind)

    @property
    def dtype(self) -> torch.dtype:
        """Of the normed rows: the model's."""
        return self.weight.dtype if self.rows is None else self.rows


def norm_weight(kind: str, read: torch.Tensor) -> torch.Tensor:
    """The weight by which kernels multiply, of the checkpoint's: fp32(1 + w) for rms_plus_one.

    Raises ValueError for another kind.
    """
    check_kind(kind)
    return 1.0 + read.float() if kind == "rms_plus_one" else read


def check_kind(kind: str) -> None:
    """Raise ValueError for what is none of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"norm {kind!r}: use one of {', '.join(KINDS)}")
