"""What a row-parallel product leaves behind: fp32 sums of leaves or subtrees, and what to add."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpdet.kernels.order import Expression, FinalExpression, operands, substitute


@dataclass(frozen=True)
class PartialSums:
    """Sums that are not yet folded, so that the kernel that reads them folds them.

    values: fp32 [C, M, N]; `roots[i]` is the i-th subtree of the fold, as an expression over
    indices of `values`. Operands stand in ascending leaf order.
    """

    values: torch.Tensor
    roots: tuple[Expression, ...]

    @property
    def device(self) -> torch.device:
        """Where the values lie."""
        return self.values.device

    @property
    def folded(self) -> bool:
        """Whether `values` are the roots themselves."""
        return self.roots == tuple(range(len(self.roots)))


def whole_sum(total: torch.Tensor) -> PartialSums:
    """The sums that a total [M, N] is: one, folded."""
    return PartialSums(total[None], (0,))


def relative_roots(roots: Sequence[Expression]) -> tuple[Expression, ...]:
    """A rank's roots over its own leaves, counted from 0; empty leaves are not counted."""
    held = [leaf for root in roots for leaf in operands(root)]
    place = {leaf: index for index, leaf in enumerate(held)}
    return tuple(substitute(root, lambda leaf: place[leaf]) for root in roots)


def gathered_sums(gathered: torch.Tensor, *finals: FinalExpression) -> PartialSums:
    """Everyone's roots [ranks, slots, M, N] fp32 and what to make of them, a root for each."""
    slots = gathered.shape[1]
    roots = (substitute(final, lambda slot: slot.rank * slots + slot.index) for final in finals)
    return PartialSums(gathered.flatten(0, 1), tuple(roots))
