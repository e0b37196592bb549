"""What runs a product by a packed weight: a tile that unpacks its own, or numbers in scratch.

Chosen by times of Qwen3-8B's products (`tests/gpu/gemm/packed.py`). Each tile is tried at start,
byte by byte (`admission.py`).
"""

from typing import NamedTuple

from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.inputs.ordered import SCRATCH_BYTES

_VALUE_BYTES = 2
_MOST_ROWS = 1024  # up to which a tile is faster than numbers in scratch

_EIGHT, _EIGHT_DEEP = PackedTile(8, 1, 64, 6), PackedTile(8, 1, 128, 4)
_SIXTEEN, _SIXTEEN_DEEP = PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4)
_FEW = (PackedTile(32, 1, 64, 4), PackedTile(64, 1, 64, 4))
_NARROW, _WIDE, _WIDEST = (
    PackedTile(128, 1, 64, 4),
    PackedTile(128, 2, 64, 4),
    PackedTile(256, 2, 64, 4),
)
_LONG = 2048  # columns of a chain from which deep steps pay at 16 rows
_APART = 64  # rows up to which leaves stay apart: few rows want many programs
_FOLDED = 2  # leaves that a program folds beyond
_MANY = 16384  # weight rows whose tiles fill a GPU however large they are
_E4M3_BITS = 8


class PackedWay(NamedTuple):
    """tile: of a product that unpacks its own weights; cut: leaves that a program folds at most."""

    tile: PackedTile
    cut: int = 1


def fits(tile: PackedTile, k: int) -> bool:
    """Whether chains of k columns are whole steps of it, two at least."""
    return k % tile.depth == 0 and k >= 2 * tile.depth


def way_of(m: int, bits: int, shape: tuple[int, int, int]) -> PackedWay | None:
    """What runs m rows by leaves [L, N, K] of codes of so many bits; None: numbers in scratch."""
    leaves, n, k = shape
    if m > _MOST_ROWS and _VALUE_BYTES * leaves * n * k <= SCRATCH_BYTES:
        return None
    return PackedWay(_tile(m, bits, n, k), 1 if m <= _APART else min(_FOLDED, leaves))


def _tile(m: int, bits: int, n: int, k: int) -> PackedTile:
    if m <= _EIGHT.rows:
        return _EIGHT_DEEP if fits(_EIGHT_DEEP, k) else _EIGHT
    if m <= _SIXTEEN.rows:
        return _SIXTEEN_DEEP if k > _LONG and fits(_SIXTEEN_DEEP, k) else _SIXTEEN
    if m <= _FEW[-1].rows:
        return next(tile for tile in _FEW if tile.rows >= m)
    if n < _MANY:
        return _WIDE if m > _NARROW.rows else _NARROW
    return _WIDEST if bits == _E4M3_BITS and m > _WIDE.rows else _WIDE
