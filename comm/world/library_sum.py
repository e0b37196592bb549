"""The only call of a library's reduction; only the approximate mode uses it.

The library chooses the order of the additions and rounds each to the tensor's dtype, which the
deterministic engine must never do; `tests/policy/test_policy.py` names the only file that may
use it.
"""

import torch.distributed as dist
from torch import Tensor


def library_sum(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace x by the sum over all ranks of `group`, in the order that NCCL or gloo chooses."""
    dist.all_reduce(x, group=group)
