"""Tiles of expert products worth measuring, and which one runs: by the tokens of a step.

A tile's rows are the slots of a block. Where blocks are spread (few tokens), a block holds every
token of the step, and nothing is gathered.
"""

from typing import NamedTuple

from tpdet.kernels.cuda.gemm.variants.tile import Tile

SPREAD_TOKENS = 16
"""Tokens up to which every block has a slot for each."""


class Bucket(NamedTuple):
    """Steps of up to `tokens` tokens: tiles of blocks of `height` slots."""

    tokens: int
    spread: bool
    tiles: tuple[Tile, ...]


def _swapped(rows: int, *stages: int, ctas: int = 1) -> tuple[Tile, ...]:
    return tuple(Tile(rows, 128, 64, 4, s, "warp_swapped", ctas=ctas) for s in stages)


def _plain(columns: int, *stages: int) -> tuple[Tile, ...]:
    return tuple(Tile(128, columns, 64, 4, s, "warp_specialised") for s in stages)


CANDIDATES = (
    Bucket(8, True, (
        *_swapped(8, 11, 6), *_swapped(16, 10),
        Tile(16, 16, 256, 4, 4, "pointer_swapped", ctas=4),
        Tile(16, 32, 256, 4, 4, "pointer_swapped", ctas=2),
        Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
        Tile(16, 64, 128, 4, 3, "pointer_swapped", ctas=3),
    )),
    Bucket(16, True, (
        *_swapped(16, 10, 6),
        Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
        Tile(16, 32, 256, 4, 4, "pointer_swapped", ctas=2),
    )),
    Bucket(16, False, _swapped(16, 10)),
    Bucket(64, False, (
        *_swapped(16, 10), *_swapped(32, 9),
        Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
    )),
    Bucket(64, True, _swapped(64, 6)),
    Bucket(256, False, (
        *_swapped(16, 10), *_swapped(32, 9), *_swapped(64, 7),
        Tile(32, 64, 128, 4, 4, "pointer_swapped", ctas=2),
    )),
    Bucket(2048, False, (
        *_swapped(64, 7), *_swapped(128, 5), *_plain(128, 5), *_plain(256, 3),
    )),
    Bucket(8192, False, (
        *_swapped(128, 5), *_plain(128, 5, 6), *_plain(256, 3),
    )),
)  # fmt: skip
