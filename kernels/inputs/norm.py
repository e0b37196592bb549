"""A norm as one value: what an operation or an exchange applies to the residual stream."""

from dataclasses import dataclass

import torch

KINDS = ("rms", "rms_plus_one", "layer")
"""rms: y = round((x * r) * weight) with r = 1 / sqrt(mean of squares + eps).
rms_plus_one: the same of a checkpoint whose weight w stands for 1 + w; see `norm_weight`.
layer: y = round((d * r) * weight + bias), d = x - mean of x, r as above of d (Ba et al. 2016, arXiv
1607.06450)."""


@dataclass(frozen=True, eq=False)
class Norm:
    """weight [N] in the dtype of the normed rows, or in fp32; eps is added to the mean of squares.

    Of kind layer the weight is [2, N], the bias behind it.

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

    @property
    def layer(self) -> bool:
        """Whether it takes the mean away and adds a bias."""
        return self.kind == "layer"


def norm_weight(kind: str, read: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The weight by which kernels multiply, of the checkpoint's: fp32(1 + w) for rms_plus_one.

    bias: of kind layer, which has one. Raises ValueError for another kind.
    """
    check_kind(kind)
    if bias is not None:
        return torch.stack([read, bias])
    return 1.0 + read.float() if kind == "rms_plus_one" else read


def check_kind(kind: str) -> None:
    """Raise ValueError for what is none of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"norm {kind!r}: use one of {', '.join(KINDS)}")
