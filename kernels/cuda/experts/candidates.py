"""Tiles of expert products worth measuring: what `tpdet tune` tries, and what tests hold alike.

Tiles by pointers have 64 weight rows, so that two or three programs share a multiprocessor. Where
128 does not divide K, their steps are half as deep and their stages twice as many: as many bytes
are on their way.
"""

from typing import NamedTuple

from tpdet.kernels.cuda.experts.sorted_tokens import BY_TOKEN_ROWS
from tpdet.kernels.cuda.experts.tiles import ExpertWeight
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.inputs.experts import ExpertLayer

_LARGE = 64  # rows of blocks that are measured however many rows an expert has


class TokenBucket(NamedTuple):
    """Tiles for steps of up to `tokens` tokens."""

    tokens: int
    by_token: bool
    tiles: tuple[Tile, ...]


def _swapped(rows: int, *stages: int) -> tuple[Tile, ...]:
    return tuple(Tile(rows, 128, 64, 4, s, "warp_swapped") for s in stages)


def _pointer(rows: int, depth: int, *cuts: tuple[int, int]) -> tuple[Tile, ...]:
    """cuts: stages, programs a multiprocessor."""
    return tuple(Tile(rows, 64, depth, 4, s, "pointer_swapped", ctas=c) for s, c in cuts)


CANDIDATES = (
    TokenBucket(8, True, (*_swapped(8, 6, 11), *_pointer(16, 128, (3, 3), (4, 2)))),
    TokenBucket(16, True, (
        *_swapped(16, 6, 10), *_pointer(16, 128, (4, 2)), *_pointer(16, 64, (8, 2)),
    )),
    TokenBucket(32, True, _swapped(32, 9)),
    TokenBucket(64, False, (
        *_swapped(8, 11), *_swapped(16, 10), *_swapped(32, 9), *_pointer(16, 128, (5, 2)),
        *_pointer(16, 64, (6, 3), (10, 2)),
    )),
    TokenBucket(256, False, (
        *_swapped(16, 10), *_swapped(32, 5, 9), *_swapped(64, 7), *_pointer(32, 128, (4, 2)),
        *_pointer(32, 64, (8, 2)),
    )),
    TokenBucket(2048, False, (
        *_swapped(64, 4, 7), *_swapped(128, 5), *_pointer(64, 128, (4, 1)),
        *_pointer(64, 64, (6, 2)),
    )),
    TokenBucket(8192, False, (*_swapped(128, 5, 6), *_swapped(256, 3))),
)  # fmt: skip

_TILES = tuple(dict.fromkeys(tile for bucket in CANDIDATES for tile in bucket.tiles))


def fits(tile: Tile, weight: ExpertWeight, gpu: Gpu) -> bool:
    """Whether a tile is worth measuring for a weight of 2-byte values on a GPU."""
    pointers = tile.variant.startswith("pointer")
    deep = not pointers or tile.depth == 128 or weight.k % 128 != 0
    return deep and (pointers or gpu.wgmma) and weight.fits(tile, gpu)


def block_forms(layer: ExpertLayer, tokens: int) -> list[tuple[int, bool]]:
    """Rows of blocks for steps of `tokens` tokens, and whether these are by token."""
    mean, heights = layer.mean_rows(tokens), sorted({tile.rows for tile in _TILES})
    if tokens <= BY_TOKEN_ROWS[-1]:
        return [(height, True) for height in BY_TOKEN_ROWS if height >= tokens]
    forms = [(height, False) for height in heights if 4 * height >= 3 * mean or height >= _LARGE]
    forms = [(height, False) for height, _ in forms if height <= max(BY_TOKEN_ROWS[-1], 4 * mean)]
    return forms + [(height, True) for height in heights if height == tokens <= 32]


def tiles_of(height: int, weight: ExpertWeight, gpu: Gpu) -> list[Tile]:
    """Those that are worth measuring for blocks of so many rows."""
    return [tile for tile in _TILES if tile.rows == height and fits(tile, weight, gpu)]
