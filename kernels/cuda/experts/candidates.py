"""Tiles of expert products worth measuring: what `tpdet tune` tries, and what tests hold alike.

Tiles by pointers have 64 weight rows, so that two or three programs share a multiprocessor. Where
128 does not divide K, their steps are half as deep and their stages twice as many: as many bytes
are on their way.
"""

from typing import NamedTuple

from tpdet.kernels.cuda.experts.places import SPREAD_HEIGHTS
from tpdet.kernels.cuda.experts.tiles import Weight
from tpdet.kernels.cuda.experts.warp_specialised_launch import takes
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.experts import ExpertLayer

_LARGE = 64  # slots of blocks that are measured however many rows an expert has


class Bucket(NamedTuple):
    """Tiles for steps of up to `tokens` tokens."""

    tokens: int
    spread: bool
    tiles: tuple[Tile, ...]


def _swapped(rows: int, *stages: int) -> tuple[Tile, ...]:
    return tuple(Tile(rows, 128, 64, 4, s, "warp_swapped") for s in stages)


def _pointer(rows: int, depth: int, *cuts: tuple[int, int]) -> tuple[Tile, ...]:
    """cuts: stages, programs a multiprocessor."""
    return tuple(Tile(rows, 64, depth, 4, s, "pointer_swapped", ctas=c) for s, c in cuts)


CANDIDATES = (
    Bucket(8, True, (*_swapped(8, 6, 11), *_pointer(16, 128, (3, 3), (4, 2)))),
    Bucket(16, True, (*_swapped(16, 6, 10), *_pointer(16, 128, (4, 2)), *_pointer(16, 64, (8, 2)))),
    Bucket(32, True, _swapped(32, 9)),
    Bucket(64, False, (
        *_swapped(8, 11), *_swapped(16, 10), *_swapped(32, 9), *_pointer(16, 128, (5, 2)),
        *_pointer(16, 64, (6, 3), (10, 2)),
    )),
    Bucket(256, False, (
        *_swapped(16, 10), *_swapped(32, 5, 9), *_swapped(64, 7), *_pointer(32, 128, (4, 2)),
        *_pointer(32, 64, (8, 2)),
    )),
    Bucket(2048, False, (
        *_swapped(64, 4, 7), *_swapped(128, 5), *_pointer(64, 128, (4, 1)),
        *_pointer(64, 64, (6, 2)),
    )),
    Bucket(8192, False, (*_swapped(128, 5, 6), *_swapped(256, 3))),
)  # fmt: skip

_TILES = tuple(dict.fromkeys(tile for bucket in CANDIDATES for tile in bucket.tiles))


def fits(tile: Tile, weight: Weight) -> bool:
    """Whether a tile is worth measuring for a weight of 2-byte values."""
    if not tile.variant.startswith("pointer"):
        return takes(tile, *weight)
    return weight.k % tile.depth == 0 and (tile.depth == 128 or weight.k % 128 != 0)


def block_forms(layer: ExpertLayer, tokens: int) -> list[tuple[int, bool]]:
    """Heights of blocks for steps of `tokens` tokens, and whether they are spread."""
    mean, heights = layer.mean_rows(tokens), sorted({tile.rows for tile in _TILES})
    if tokens <= SPREAD_HEIGHTS[-1]:
        return [(height, True) for height in SPREAD_HEIGHTS if height >= tokens]
    forms = [(height, False) for height in heights if 4 * height >= 3 * mean or height >= _LARGE]
    forms = [(height, False) for height, _ in forms if height <= max(SPREAD_HEIGHTS[-1], 4 * mean)]
    return forms + [(height, True) for height in heights if height == tokens <= 32]


def tiles_of(height: int, weight: Weight) -> list[Tile]:
    """Those of blocks of a height that are worth measuring."""
    return [tile for tile in _TILES if tile.rows == height and fits(tile, weight)]
