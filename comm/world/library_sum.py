"""The one call of a library's reduction: for the approximate mode and for nothing else.

The library chooses the order of the additions and rounds each to the tensor's dtype. Rule 4 keeps
this out of the deterministic engine; `tests/policy/test_policy.py` names the only file that may
use it.
"""

import torch.distributed as dist
from torch import Tensor


def library_sum(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace x by the sum over all ranks of `group`, in whatever order (NCCL, gloo)."""
    dist.all_reduce(x, group=group)
