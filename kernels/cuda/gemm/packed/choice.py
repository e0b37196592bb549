"""The tile of a product by a packed weight; rows from which its numbers are written out first.

Each tile is tried at start, byte by byte (`admission.py`). Times: `tests/gpu/gemm/packed.py`.
"""

from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.inputs.ordered import OrderedWeight

MOST_ROWS = 512
"""Rows up to which a tile unpacks its own weights; with more, all of them are, once."""

_APART = 32  # rows up to which leaves stay apart: few rows want many programs
_TILES = (
    PackedTile(8, 1, 128, 4),
    PackedTile(8, 1, 64, 6),
    PackedTile(16, 1, 128, 4),
    PackedTile(16, 1, 64, 6),
    PackedTile(32, 1, 64, 4),
    PackedTile(64, 2, 64, 4),
    PackedTile(128, 2, 64, 4),
    PackedTile(256, 2, 64, 4),
)
"""By rows; of as many rows the first that fits."""
_WIDEST_FOLDED = 128  # rows of a tile that has registers for a second sum
CANDIDATES = (
    *_TILES,
    PackedTile(8, 2, 64, 6),
    PackedTile(16, 2, 128, 4),
    PackedTile(64, 1, 64, 4),
    PackedTile(64, 2, 128, 3),
    PackedTile(64, 4, 64, 4),
    PackedTile(128, 2, 128, 3),
)
"""Tiles worth measuring."""


def fits(tile: PackedTile, weight: OrderedWeight) -> bool:
    """Whether leaves are an even number of its steps."""
    return weight.shape[2] % (2 * tile.depth) == 0


def tile_of(m: int, weight: OrderedWeight) -> PackedTile:
    """What runs m rows."""
    folds = cut_of(m, weight) > 1
    rows = min(m, _WIDEST_FOLDED if folds else _TILES[-1].rows)
    return next(tile for tile in _TILES if tile.rows >= rows and fits(tile, weight))


def cut_of(m: int, weight: OrderedWeight) -> int:
    """Leaves of a row product that a program folds: their sums' traffic grows with the rows."""
    return 1 if m <= _APART else min(2, weight.shape[0])
