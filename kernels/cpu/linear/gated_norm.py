"""The norm of linear attention's outputs, a head at a time, times the SiLU of its gate.

    y = round(((o * r) * w) * silu(z))        fp32; r is a norm's, over the head's values

The weight is w itself, where the family's other norms have 1 + w.
"""

import torch

from tpdet.kernels.cpu.pointwise.activation import activate_alone
from tpdet.kernels.cpu.pointwise.norm import normalize


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o, z [M, Hv, Dv], weight [Dv] -> [M, Hv, Dv] in z's dtype, rounded once."""
    gate = activate_alone(z.float().contiguous(), "silu")
    return (normalize(o.float(), weight, eps) * gate).to(z.dtype)
