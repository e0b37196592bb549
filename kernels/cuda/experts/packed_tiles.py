"""Tiles of expert products whose weights are codes and scales; one table for both products.

Chosen by times on an H200 (`scripts/gpu_times/kernels/packed_experts.py`); each is tried at start.
"""

from typing import NamedTuple

from tpdet.kernels.cuda.experts.sorted_tokens import BY_TOKEN_ROWS
from tpdet.kernels.cuda.gemm.packed.choice import fits
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.inputs.experts import ExpertLayer


class PackedLayerTiles(NamedTuple):
    """As `LayerTiles`."""

    gate_up: PackedTile
    down: PackedTile
    by_token: bool


_EIGHT = PackedTile(8, 1, 128, 4)
_SIXTEEN, _SIXTEEN_DEEP = PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4)
_IN_BLOCKS = (
    (4.0, _EIGHT),
    (12.0, _SIXTEEN),
    (24.0, PackedTile(32, 1, 64, 4)),
    (48.0, PackedTile(64, 1, 64, 4)),
    (float("inf"), PackedTile(128, 2, 64, 6, True)),
)
"""Mean rows of an expert up to which a tile was the fastest."""
_SHALLOW = {_EIGHT: PackedTile(8, 1, 64, 6)}
"""What runs where steps of 128 columns do not fit."""
_LONG = 2048  # columns from which deep steps pay at 16 rows


def packed_tiles(layer: ExpertLayer, tokens: int) -> PackedLayerTiles:
    """For steps of `tokens` rows."""
    mean = layer.mean_rows(tokens)
    gate_up, by_token = packed_tile(tokens, mean, layer.hidden)
    return PackedLayerTiles(gate_up, packed_tile(tokens, mean, layer.width)[0], by_token)


def packed_tile(tokens: int, mean: float, k: int) -> tuple[PackedTile, bool]:
    """The tile of one product by chains of k columns, and whether blocks are by token.

    mean: rows of an expert.
    """
    if tokens <= BY_TOKEN_ROWS[-1]:
        return _of(_EIGHT if tokens <= _EIGHT.rows else _SIXTEEN, k), True
    return _of(next(tile for most, tile in _IN_BLOCKS if mean <= most), k), False


def _of(tile: PackedTile, k: int) -> PackedTile:
    """The tile by which chains of k columns go."""
    if tile == _SIXTEEN and k >= _LONG:
        tile = _SIXTEEN_DEEP
    return tile if fits(tile, k) else _SHALLOW.get(tile, _SIXTEEN)


def packed_tiles_in_use(k: int) -> list[tuple[PackedTile, bool]]:
    """What steps of any length may run by chains of k columns, and whether blocks are by token."""
    few = [(_of(tile, k), True) for tile in (_EIGHT, _SIXTEEN)]
    return [*few, *((_of(tile, k), False) for _, tile in _IN_BLOCKS)]
