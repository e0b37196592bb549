"""What runs a product by a packed weight: a tile that unpacks its own, or numbers in scratch.

Chosen by times of Qwen3-8B's products on an H200 (`scripts/gpu_times/kernels/packed.py`); 4 and 8
bits want the same. Each tile is tried at start, byte by byte (`admission.py`).
"""

from typing import NamedTuple

from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.ordered import SCRATCH_BYTES, UNIT

_VALUE_BYTES = 2
_TILED_ROWS = 1024  # up to which a tile is faster than numbers in scratch
_TILED_COLUMN_ROWS = 3072  # the same of one leaf
_PROGRAMS = 132  # multiprocessors of an H100 and an H200
_LONG = 2048  # columns of a chain behind which deep steps pay at 16 rows
_MOST_SCALES = 128  # of a weight row, that the shared memory has beside large or many tiles
_FOLDED, _FOLDED_BY_WARPS = 2, 4  # leaves that a program folds
_MANY = 16384  # weight rows whose tiles fill a GPU however large they are


class PackedWay(NamedTuple):
    """tile: of a product that unpacks its own weights; cut: leaves that a program folds at most."""

    tile: PackedTile
    cut: int = 1


_COPIED = (
    PackedWay(PackedTile(8, 1, 128, 4, programs=3)),
    PackedWay(PackedTile(16, 1, 128, 4, programs=3)),
    PackedWay(PackedTile(32, 1, 64, 4)),  # that with a warp is not timed
    PackedWay(PackedTile(64, 1, 64, 4, programs=3)),
)
"""Products of many weight rows take these: in most of them a warp copies."""
_TURNS = (
    PackedWay(PackedTile(8, 1, 256, 4, programs=1, turns=True)),
    PackedWay(PackedTile(16, 1, 256, 3, programs=1, turns=True)),
    PackedWay(PackedTile(64, 1, 64, 8, programs=1)),
    PackedWay(PackedTile(128, 1, 64, 6, programs=1)),
)
"""Products of fewer tiles than fill a GPU take these: they are as long as one chain."""
_FOLDS = (
    PackedWay(PackedTile(8, 1, 128, 4, programs=3), _FOLDED),
    PackedWay(PackedTile(16, 1, 64, 6, programs=4)),
    PackedWay(PackedTile(32, 1, 64, 4)),  # others are not timed
    PackedWay(PackedTile(64, 1, 64, 6, programs=2), _FOLDED),
    PackedWay(PackedTile(128, 1, 64, 4, programs=2), _FOLDED),
)
"""Row products take these where half as many programs as leaves have tiles fill a GPU."""
_LONG_SIXTEEN = PackedWay(PackedTile(16, 1, 128, 4))
_SMALL = (
    PackedWay(PackedTile(8, 1, 128, 4)),
    PackedWay(PackedTile(8, 1, 64, 6)),
    _LONG_SIXTEEN,
    PackedWay(PackedTile(16, 1, 64, 6)),
    PackedWay(PackedTile(32, 1, 64, 4)),
    PackedWay(PackedTile(64, 1, 64, 4)),
    PackedWay(PackedTile(128, 1, 64, 4), _FOLDED),
)
"""All other products of up to 128 rows take the first of these that fits."""
_WARPS, _FOLDING_WARPS = PackedTile(128, 2, 64, 5, True), PackedTile(128, 2, 64, 4, True)
_THREE_GROUPS, _WIDEST = PackedTile(128, 3, 64, 6, True), PackedTile(256, 2, 64, 4)
_WARPS_WAVE = 0.6  # time of a wave of 128 rows, where one of 256 takes 1


def fits(tile: PackedTile, k: int) -> bool:
    """Whether chains of k columns are whole steps of it, two at least."""
    return k % tile.depth == 0 and k >= 2 * tile.depth


def way_of(m: int, shape: tuple[int, int, int], group: int) -> PackedWay | None:
    """What runs m rows by leaves [L, N, K] of codes; None: numbers in scratch.

    group: columns that share a scale.
    """
    leaves, n, k = shape
    most = _TILED_COLUMN_ROWS if leaves == 1 else _TILED_ROWS
    if m > most and _VALUE_BYTES * leaves * n * k <= SCRATCH_BYTES:
        return None
    if m <= _SMALL[-1].tile.rows and (way := _few_rows(m, leaves, n, k, group)) is not None:
        return way
    return _many_rows(m, leaves, n, k, group)


def _few_rows(m: int, leaves: int, n: int, k: int, group: int) -> PackedWay | None:
    """Up to 128 rows, by how many tiles there are; None: as of more rows."""
    units = cdiv(n, UNIT)
    for ways, right in (
        (_COPIED, leaves == 1 and n >= _MANY),
        (_TURNS, leaves == 1 and units <= _PROGRAMS),
        (_FOLDS, units * leaves >= _FOLDED * _PROGRAMS and leaves > 1),
    ):
        way = next((way for way in ways if way.tile.rows >= m), None)
        if not right or way is None or not fits(way.tile, k):
            continue
        if way.cut * cdiv(k, group) <= _MOST_SCALES:
            return way
    if leaves == 1 and n >= _MANY and m > _COPIED[-1].tile.rows:
        return None
    small = [way for way in _SMALL if way.tile.rows >= m and fits(way.tile, k)]
    way = small[1] if small[0] == _LONG_SIXTEEN and k <= _LONG else small[0]
    return PackedWay(way.tile, min(way.cut, leaves))


def _many_rows(m: int, leaves: int, n: int, k: int, group: int) -> PackedWay:
    if leaves > 1:
        return PackedWay(_FOLDING_WARPS, min(_FOLDED_BY_WARPS, leaves))
    across = cdiv(n, 2 * UNIT)
    of_three = 3 * cdiv(cdiv(n, 3 * UNIT), _PROGRAMS)  # warpgroups' tiles, one behind the other
    if m <= _WARPS.rows and of_three < 2 * cdiv(across, _PROGRAMS):
        return PackedWay(_THREE_GROUPS)
    waves, wide = (cdiv(cdiv(m, rows) * across, _PROGRAMS) for rows in (_WARPS.rows, _WIDEST.rows))
    if cdiv(k, group) > _MOST_SCALES or _WARPS_WAVE * waves <= wide:
        return PackedWay(_WARPS)
    return PackedWay(_WIDEST)
