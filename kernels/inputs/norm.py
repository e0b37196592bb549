"""Norms as values, and what an operation or an exchange makes of a block's sums with them."""

from dataclasses import dataclass
from typing import NamedTuple

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
        """The dtype of the normed rows: the model's."""
        return self.weight.dtype if self.rows is None else self.rows

    @property
    def formula(self) -> str:
        """The kind by which kernels compute: "rms" or "layer"."""
        return "rms" if self.kind == "rms_plus_one" else self.kind


class Finish(NamedTuple):
    """What becomes of a block's whole sums t [M, N]: the stream h with them, and y, its norm.

        h = t + residual                                y = norm(h)
        h = behind(t) + residual                        where a norm stands behind the block
                                                        y = h in behind's dtype, without a norm

    residual: fp32 [M, N], the stream before the block. Every addition is rounded to fp32, and each
    norm to its dtype. One of the two norms is there, or both.
    """

    residual: torch.Tensor
    norm: Norm | None
    behind: Norm | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of y."""
        norm = self.behind if self.norm is None else self.norm
        assert norm is not None  # one of them is there
        return norm.dtype

    def of_rows(self, rows: slice) -> "Finish":
        """The same for some of the rows."""
        return self._replace(residual=self.residual[rows])


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
