"""What the Triton kernels of a chain are compiled for, as one record."""

from itertools import accumulate
from typing import NamedTuple

from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands


class ChainForm(NamedTuple):
    """Compile-time constants of a kernel that adds up chains.

    ROWS, COLUMNS, DEPTH: a tile's rows of x, its columns of y, a step of K. HALVES: pieces of the
    store. SWAP: the weight's rows stand on the M side of the matrix instruction. EVEN: no tile
    reaches past N. BIAS: there is one. GATED: the number of an activation, 0 without gates.
    EXPERTS, SHARED: as `Operands.expert_ids` and `Operands.shared` say. EDGES: where leaves of
    unequal width begin, and the last one ends, in steps of K; empty for equal leaves.
    """

    ROWS: int
    COLUMNS: int
    DEPTH: int
    HALVES: int
    SWAP: bool
    EVEN: bool = False
    BIAS: bool = False
    GATED: int = 0
    EXPERTS: bool = False
    SHARED: bool = False
    EDGES: tuple[int, ...] = ()


def chain_form(operands: Operands, tile: Tile, even: bool = False) -> ChainForm:
    """The form of a launch over these operands; even: for kernels that know of `EVEN`."""
    _, _, bias, _, gated, widths, expert_ids, shared, _ = operands
    return ChainForm(
        tile.rows,
        tile.columns,
        tile.depth,
        tile.halves,
        tile.variant.endswith("_swapped"),
        even,
        bias is not None,
        gated,
        expert_ids is not None,
        shared,
        (0, *accumulate(width // tile.depth for width in widths)) if widths else (),
    )
