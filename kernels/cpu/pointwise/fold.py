"""Adding leaf sums and subtree roots in the fold's order; fp32, one addition a node."""

import torch

from tpdet.kernels.order import Expression, FinalExpression, evaluate


def fold_roots(
    partials: torch.Tensor, first_leaf: int, roots: tuple[Expression, ...], slots: int
) -> torch.Tensor:
    """Fold a rank's leaves into what it sends.

    partials [L, ...] fp32, leaf `first_leaf + i` at index i -> [slots, ...] fp32; slots that this
    rank does not fill are zero.
    """
    sent = torch.zeros(slots, *partials.shape[1:])
    for index, root in enumerate(roots):
        sent[index] = evaluate(root, lambda leaf: partials[leaf - first_leaf], torch.add)
    return sent


def fold_final(gathered: torch.Tensor, final: FinalExpression) -> torch.Tensor:
    """gathered [ranks, slots, ...] fp32 -> [...] fp32."""
    return evaluate(final, lambda slot: gathered[slot.rank, slot.index], torch.add)
