"""Tiles of expert products worth measuring, and which ones run: by the rows of a step.

A tile's rows are the slots of a block. Where blocks are spread (few tokens), a block holds every
token of the step, and nothing is gathered. Both products of a layer have blocks of one height.
"""

from typing import NamedTuple

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.places import SPREAD_HEIGHTS
from tpdet.kernels.cuda.experts.warp_specialised_launch import takes
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors


class LayerTiles(NamedTuple):
    """What runs a layer's experts: tiles of both products, and whether blocks are spread."""

    gate_up: Tile
    down: Tile
    spread: bool


class Bucket(NamedTuple):
    """Steps of up to `tokens` tokens: tiles of blocks of `height` slots."""

    tokens: int
    spread: bool
    tiles: tuple[Tile, ...]


def _swapped(rows: int, *stages: int) -> tuple[Tile, ...]:
    return tuple(Tile(rows, 128, 64, 4, s, "warp_swapped") for s in stages)


CANDIDATES = (
    Bucket(8, True, (
        *_swapped(8, 6, 11), Tile(16, 64, 128, 4, 3, "pointer_swapped", ctas=3),
        Tile(16, 64, 128, 4, 4, "pointer_swapped", ctas=2),
    )),
    Bucket(16, True, (*_swapped(16, 6, 10), Tile(16, 64, 128, 4, 4, "pointer_swapped", ctas=2))),
    Bucket(64, False, (
        *_swapped(16, 10), *_swapped(32, 9), Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
    )),
    Bucket(256, False, (
        *_swapped(16, 10), *_swapped(32, 9), *_swapped(64, 7),
        Tile(32, 64, 128, 4, 4, "pointer_swapped", ctas=2),
    )),
    Bucket(2048, False, (*_swapped(64, 7), *_swapped(128, 5))),
    Bucket(8192, False, (*_swapped(128, 5, 6), *_swapped(256, 3))),
)  # fmt: skip

# Mean rows of an expert up to which a tile was the fastest on an H200, for both products.
_FEW = Tile(8, 128, 64, 4, 6, "warp_swapped")
_SIXTEEN, _THIRTY_TWO = (Tile(r, 128, 64, 4, s, "warp_swapped") for r, s in ((16, 10), (32, 9)))
_HOPPER = (
    (8.0, _SIXTEEN),
    (24.0, _THIRTY_TWO),
    (48.0, Tile(64, 128, 64, 4, 7, "warp_swapped")),
    (float("inf"), Tile(128, 128, 64, 4, 5, "warp_swapped")),
)
_GATED = {
    _SIXTEEN: Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
    _THIRTY_TWO: Tile(32, 64, 128, 4, 4, "pointer_swapped", ctas=2),
}
"""What is 1 to 2 % faster than a tile for gates and ups, where blocks are gathered."""
_POINTER = (
    (24.0, Tile(16, 64, 128, 4, 4, "pointer_swapped", ctas=2)),
    (96.0, Tile(64, 64, 128, 4, 4, "pointer_swapped")),
    (float("inf"), Tile(128, 128, 64, 8, 3, "pointer")),
)
_FLOAT32 = (
    (24.0, Tile(16, 64, 32, 4, 3, "pointer_swapped", ctas=2)),
    (float("inf"), Tile(64, 64, 32, 8, 3, "pointer", ctas=2)),
)


def programs(device: torch.device) -> int:
    """Multiprocessors of a GPU with the matrix instruction of a warpgroup, else 0."""
    return multiprocessors(device) if hardware.gpu_of(device).wgmma else 0


class Weight(NamedTuple):
    """One expert's [n, k] of values of `size` bytes; gated: its rows are gates and ups in turn."""

    n: int
    k: int
    size: int
    gated: bool

    @staticmethod
    def of(weights: torch.Tensor, gated: bool) -> "Weight":
        """Of weights [E, N, K]."""
        return Weight(weights.shape[1], weights.shape[2], weights.element_size(), gated)


def layer_tiles(tokens: int, mean: float, gate_up: Weight, down: Weight, sms: int) -> LayerTiles:
    """For `tokens` rows, `mean` of them for each expert; sms: of `programs`."""
    up, spread = product_tile(tokens, mean, gate_up, sms)
    below, _ = product_tile(tokens, mean, down, sms)
    if up.rows != below.rows:  # only one of them takes the fast form
        up, spread = product_tile(tokens, mean, gate_up, 0)
        below, _ = product_tile(tokens, mean, down, 0)
    return LayerTiles(up, below, spread)


def product_tile(tokens: int, mean: float, weight: Weight, sms: int) -> tuple[Tile, bool]:
    """The tile of one product, and whether blocks are spread; as `layer_tiles`."""
    spread, small = tokens <= SPREAD_HEIGHTS[-1], weight.size == 2
    if sms and small:
        tile = next(tile for most, tile in _HOPPER if spread or mean <= most)
        tile = _FEW if tokens <= _FEW.rows else tile
        if takes(tile, *weight):
            other = _GATED.get(tile) if weight.gated and not spread else None
            return (tile if other is None else other.at(weight.k)), spread
    tile = next(tile for most, tile in (_POINTER if small else _FLOAT32) if mean <= most)
    return tile.at(weight.k), spread and tokens <= tile.rows


def product_tiles(weight: Weight, sms: int) -> list[tuple[Tile, bool]]:
    """All that `product_tile` names for a weight, whatever the step."""
    means = [most for most, _ in (*_HOPPER, *_POINTER, *_FLOAT32)]
    steps = [(tokens, mean) for tokens in (1, *SPREAD_HEIGHTS, 1024) for mean in means]
    return list(dict.fromkeys(product_tile(*step, weight, sms) for step in steps))
