"""What a row-parallel product leaves behind: fp32 sums of leaves or subtrees, and what to add."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpdet.kernels.order import Expression, FinalExpression, Slot, evaluate


@dataclass(frozen=True)
class PartialSums:
    """Sums that are not yet folded, so that the kernel that reads them folds them.

    values: fp32 [C, M, N]; `roots[i]` is the i-th subtree of the fold, as an expression over
    indices of `values`. Operands stand in ascending leaf order.
    """

    values: torch.Tensor
    roots: tuple[Expression, ...]

    @property
    def folded(self) -> bool:
        """Whether `values` are the roots themselves."""
        return self.roots == tuple(range(len(self.roots)))

    @property
    def is_total(self) -> bool:
        """Whether one sum is left, and nothing to add."""
        return self.roots == (0,)


def relative_roots(roots: Sequence[Expression], first_leaf: int) -> tuple[Expression, ...]:
    """A rank's roots over its own leaves, counted from 0."""

    def moved(node: Expression) -> Expression:
        return node - first_leaf if isinstance(node, int) else (moved(node[0]), moved(node[1]))

    return tuple(moved(root) for root in roots)


def gathered_sums(gathered: torch.Tensor, *finals: FinalExpression) -> PartialSums:
    """Everyone's roots [ranks, slots, M, N] fp32 and what to make of them, a root for each."""
    slots = gathered.shape[1]

    def flat(node: FinalExpression) -> Expression:
        if isinstance(node, Slot):
            return node.rank * slots + node.index
        return flat(node[0]), flat(node[1])

    return PartialSums(gathered.flatten(0, 1), tuple(flat(final) for final in finals))


def operands(root: Expression) -> list[int]:
    """Indices that an expression reads, in order."""
    return evaluate(root, lambda index: [index], lambda left, right: left + right)
