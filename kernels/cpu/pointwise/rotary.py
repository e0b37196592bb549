"""Query-key norm and rotary embedding in one: fp32 throughout, no fma, one rounding at the end.

first'  = first * cos - second * sin
second' = second * cos + first * sin          (halves of a head, as Hugging Face pairs them)
"""

import torch

from tpdet.kernels.cpu.pointwise.norm import normalize


def rotate_heads(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """x [M, heads, D], cos and sin [M, D / 2] fp32, norm_weight [D] or None -> [M, heads, D]."""
    wide = x.float()
    if norm_weight is not None:
        wide = normalize(wide, norm_weight, eps)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
