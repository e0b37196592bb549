"""The fixed-order reduction: every rank sends its subtree roots, and the rest is added in order.

Pattern of use: a row-parallel layer computes its fp32 leaf sums, folds them into its subtree roots
and calls `add_roots` (`fold_over_ranks` does both steps on leaf sums); all ranks get the same bits
as a single rank would. The transport copies bytes; the additions are ours.

    one-shot   roots to everyone, everyone adds all rows            few rows: one collective
    two-shot   roots of rows [r * share, ...) to rank r, which adds them, then the sums to everyone
               share = ceil(M / ranks); a rank may own no row       many rows: fewer bytes

Both evaluate one expression once an element (Rule 4), so the bits are equal and the number of rows
may choose.
"""

import torch

from tpdet.comm.world import World
from tpdet.kernels import ops
from tpdet.kernels.order import FoldPlan, Slot

TWO_SHOT_ROWS = 256
"""From so many rows on the two-shot is taken."""


def fold_over_ranks(
    partials: torch.Tensor, plan: FoldPlan, world: World, two_shot_rows: int = TWO_SHOT_ROWS
) -> torch.Tensor:
    """This rank's leaf sums [L, M, N] fp32 -> the whole sum [M, N] fp32, equal on every rank."""
    first_leaf = world.rank * (plan.leaves // world.size)
    sent = ops.fold_roots(partials, first_leaf, plan.roots[world.rank], plan.slots)
    return add_roots(sent, plan, world, two_shot_rows)


def add_roots(
    sent: torch.Tensor, plan: FoldPlan, world: World, two_shot_rows: int = TWO_SHOT_ROWS
) -> torch.Tensor:
    """This rank's subtree roots [slots, M, N] fp32 -> the whole sum [M, N] fp32, on every rank."""
    if isinstance(plan.final, Slot):
        return sent[plan.final.index]  # one rank's root is the whole tree
    if sent.shape[1] < two_shot_rows:
        return ops.fold_final(world.all_gather(sent), plan.final)
    return _two_shot(sent, plan, world)


def _two_shot(sent: torch.Tensor, plan: FoldPlan, world: World) -> torch.Tensor:
    """This rank's roots [slots, M, N] -> [M, N]; blocks are of one size, padded with any bits."""
    slots, rows, columns = sent.shape
    share = -(-rows // world.size)
    padded = sent
    if share * world.size != rows:
        padded = sent.new_zeros(slots, share * world.size, columns)
        padded[:, :rows] = sent
    blocks = padded.view(slots, world.size, share, columns).transpose(0, 1).contiguous()
    mine = ops.fold_final(world.all_to_all(blocks), plan.final)
    return world.all_gather(mine).view(-1, columns)[:rows]
