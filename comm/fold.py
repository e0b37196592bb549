"""The fixed-order reduction: every rank sends its subtree roots, everyone adds the rest.

Pattern of use: a row-parallel layer computes fp32 leaf sums and calls `fold_over_ranks`; all ranks
get the same bits as a single rank would. The transport copies bytes; the additions are ours.
"""

import torch

from tpdet.comm.world import World
from tpdet.kernels import ops
from tpdet.kernels.order import FoldPlan


def fold_over_ranks(partials: torch.Tensor, plan: FoldPlan, world: World) -> torch.Tensor:
    """This rank's leaf sums [L, M, N] fp32 -> the whole sum [M, N] fp32, equal on every rank."""
    first_leaf = world.rank * (plan.leaves // world.size)
    sent = ops.fold_roots(partials, first_leaf, plan.roots[world.rank], plan.slots)
    return ops.fold_final(world.all_gather(sent), plan.final)
