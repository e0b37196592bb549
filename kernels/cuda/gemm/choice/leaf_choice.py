"""How a rank's leaves are cut over programs, by which kernel and tile.

A cut folds every subtree of `cut` leaves inside one program; what is left of the roots is for the
kernel that reads the sums. Cut 1 leaves all of it to the reader, a cut as wide as a root none. Few
programs want small cuts, many rows little memory traffic (whole roots). Every choice gives the same
bits.
"""

from dataclasses import dataclass
from functools import cache

from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.order import Expression, operands


@dataclass(frozen=True)
class LeafChoice:
    """Subtrees of `cut` leaves a program, by `kernel`, one of KERNELS."""

    cut: int
    kernel: str
    tile: Tile


@cache
def cut_roots(
    roots: tuple[Expression, ...], cut: int
) -> tuple[tuple[Expression, ...], tuple[Expression, ...]] | None:
    """Subtrees of exactly `cut` leaves that cover the roots, and the roots over their indices.

    None if the roots have no such cut.
    """
    units: list[Expression] = []

    def over_units(node: Expression) -> Expression | None:
        size = len(operands(node))
        if size == cut:
            units.append(node)
            return len(units) - 1
        if isinstance(node, int) or size < cut:
            return None
        left = over_units(node[0])
        right = None if left is None else over_units(node[1])
        return None if left is None or right is None else (left, right)

    rest = [over_units(root) for root in roots]
    found = tuple(root for root in rest if root is not None)
    return (tuple(units), found) if len(found) == len(roots) else None
