"""What runs a product by a packed weight: a tile that unpacks its own, or numbers in scratch.

Chosen by times of Qwen3-8B's products (`scripts/gpu_times/kernels/packed.py`): of 4 bits on an
H100, of 8 bits from 65 rows on on an H200. Each tile is tried at start, byte by byte
(`admission.py`).
"""

from typing import NamedTuple

from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.ordered import SCRATCH_BYTES, UNIT

_VALUE_BYTES = 2
_TILED_ROWS = 1024  # up to which a tile is faster than numbers in scratch
_TILED_COLUMN_ROWS = 4096  # the same of 8 bits and one leaf
_PROGRAMS = 132  # multiprocessors of an H100 and an H200

_EIGHT, _EIGHT_DEEP = PackedTile(8, 1, 64, 6), PackedTile(8, 1, 128, 4)
_SIXTEEN, _SIXTEEN_DEEP = PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4)
_FEW = (PackedTile(32, 1, 64, 4), PackedTile(64, 1, 64, 4))
_COPIED = (
    PackedTile(8, 1, 64, 6, programs=4),
    PackedTile(16, 1, 64, 6, programs=3),
    _FEW[0],  # that with a warp is not timed
    PackedTile(64, 1, 64, 4, programs=3),
)
"""Tiles of many weight rows of 8 bits: for most of them a warp copies."""
_NARROW, _WIDE, _WIDEST = (
    PackedTile(128, 1, 64, 4),
    PackedTile(128, 2, 64, 4),
    PackedTile(256, 2, 64, 4),
)
_WARPS, _FOLDING_WARPS = PackedTile(128, 2, 64, 5, True), PackedTile(128, 2, 64, 4, True)
_WARPS_WAVE = 0.6  # time of a wave of 128 rows, where one of 256 takes 1
_LONG = 2048  # columns of a chain from which deep steps pay at 16 rows
_LONGEST = 16384  # columns whose scales the shared memory has beside the widest tile
_FOLDED, _FOLDED_BY_WARPS = 2, 4  # leaves that a program folds from 65 rows on
_MANY = 16384  # weight rows whose tiles fill a GPU however large they are


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
    most = _TILED_COLUMN_ROWS if bits == 8 and leaves == 1 else _TILED_ROWS
    if m > most and _VALUE_BYTES * leaves * n * k <= SCRATCH_BYTES:
        return None
    if m <= _FEW[-1].rows:
        if bits == 8 and leaves == 1 and n >= _MANY:
            return PackedWay(next(tile for tile in _COPIED if tile.rows >= m))
        return PackedWay(_small_tile(m, k))
    if bits == 8:
        return _by_float(m, leaves, n, k)
    tile = _WIDE if n >= _MANY or m > _NARROW.rows else _NARROW
    return PackedWay(tile, min(_FOLDED, leaves))


def _small_tile(m: int, k: int) -> PackedTile:
    """Up to 64 rows."""
    if m <= _EIGHT.rows:
        return _EIGHT_DEEP if fits(_EIGHT_DEEP, k) else _EIGHT
    if m <= _SIXTEEN.rows:
        return _SIXTEEN_DEEP if k > _LONG and fits(_SIXTEEN_DEEP, k) else _SIXTEEN
    return next(tile for tile in _FEW if tile.rows >= m)


def _by_float(m: int, leaves: int, n: int, k: int) -> PackedWay:
    """More rows by codes of 8 bits, of which a value costs three instructions."""
    across, cut = cdiv(n, 2 * UNIT), min(_FOLDED if m <= _WARPS.rows else _FOLDED_BY_WARPS, leaves)
    if m <= _WARPS.rows and across * (leaves // cut) < 0.9 * _PROGRAMS:
        return PackedWay(_NARROW, cut)
    if leaves > 1:
        return PackedWay(_FOLDING_WARPS, cut)
    waves, wide = (cdiv(cdiv(m, rows) * across, _PROGRAMS) for rows in (_WARPS.rows, _WIDEST.rows))
    if k > _LONGEST or _WARPS_WAVE * waves <= wide:
        return PackedWay(_WARPS)
    return PackedWay(_WIDEST)
