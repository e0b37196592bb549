"""The tile of a product by a packed weight; rows from which its numbers are written out first.

Chosen by times on an H100 of Qwen3-8B's products (`tests/gpu/gemm/packed.py`). Each tile is tried
at start, byte by byte (`admission.py`).
"""

from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.inputs.ordered import OrderedWeight

MOST_ROWS = 1024
"""Rows up to which a tile unpacks its own weights; with more, all of them are, once."""

_EIGHT, _EIGHT_DEEP = PackedTile(8, 1, 64, 6), PackedTile(8, 1, 128, 4)
_SIXTEEN, _SIXTEEN_DEEP = PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4)
_FEW = (PackedTile(32, 1, 64, 4), PackedTile(64, 1, 64, 4))
_NARROW, _WIDE, _WIDEST = (
    PackedTile(128, 1, 64, 4),
    PackedTile(128, 2, 64, 4),
    PackedTile(256, 2, 64, 4),
)
CANDIDATES = (
    _EIGHT_DEEP,
    _EIGHT,
    _SIXTEEN_DEEP,
    _SIXTEEN,
    *_FEW,
    _NARROW,
    _WIDE,
    _WIDEST,
    PackedTile(64, 2, 64, 4),
    PackedTile(256, 1, 64, 3),
)
"""Tiles worth measuring."""

_LONG = 2048  # columns of a chain from which deep steps pay at 16 rows
_APART = 64  # rows up to which leaves stay apart: few rows want many programs
_FOLDED = 2  # leaves that a program folds beyond
_MANY = 16384  # weight rows whose tiles fill a GPU however large they are
_E4M3_BITS = 8


def fits(tile: PackedTile, weight: OrderedWeight) -> bool:
    """Whether leaves are an even number of its steps."""
    return weight.shape[2] % (2 * tile.depth) == 0


def tile_of(m: int, weight: OrderedWeight) -> PackedTile:
    """What runs m rows."""
    _, n, k = weight.shape
    if m <= _EIGHT.rows:
        return _EIGHT_DEEP if fits(_EIGHT_DEEP, weight) else _EIGHT
    if m <= _SIXTEEN.rows:
        return _SIXTEEN_DEEP if k > _LONG and fits(_SIXTEEN_DEEP, weight) else _SIXTEEN
    if m <= _FEW[-1].rows:
        return next(tile for tile in _FEW if tile.rows >= m)
    if n < _MANY:
        return _WIDE if m > _NARROW.rows else _NARROW
    return _WIDEST if weight.bits == _E4M3_BITS and m > _WIDE.rows else _WIDE


def cut_of(m: int, weight: OrderedWeight) -> int:
    """Leaves of a row product that a program folds: their sums' traffic grows with the rows."""
    return 1 if m <= _APART else min(_FOLDED, weight.shape[0])
