"""Tiles worth measuring, as data: by rows and columns of a product, a rule a line.

The tuner measures those that fit; the static choice of row products estimates them. They reach
further than the static choice of column products: more stages (a narrow shard has few programs, so
each must keep many bytes in flight), tiles of 8 or 16 weight rows with 512 steps of K (many
programs, `mma.sync`), and the weight on the M side of descriptor tiles.
"""

from collections.abc import Mapping
from typing import NamedTuple

Size = tuple[int, int, int, int, int]
"""Rows, columns, depth, warps, stages."""

_NO_END = 1 << 62
ALL = (1, _NO_END)
NARROW = (1, 3072)
"""Columns up to which one tile of 64 a program leaves processors idle."""
_WIDER = (3073, _NO_END)
_MIDDLE = (1, 12288)


class TileRule(NamedTuple):
    """Products with rows and columns in these bounds, both included, may take the tiles.

    kernels: which of them run at each cut of a row product. ctas: programs a multiprocessor.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    variant: str
    tiles: tuple[Size, ...]
    ctas: int = 1
    kernels: Mapping[int, tuple[str, ...]] = {}


_POINTER_SWAP_16 = (
    (16, 64, 128, 4, 5), (16, 64, 128, 4, 4), (16, 64, 128, 4, 7), (16, 64, 256, 4, 3),
    (16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (16, 128, 64, 4, 6),
)  # fmt: skip
_POINTER_SWAP_32 = (
    (32, 64, 128, 4, 4), (32, 64, 128, 4, 6), (32, 64, 256, 4, 3), (32, 64, 256, 4, 4),
    (32, 128, 128, 4, 4), (32, 128, 64, 4, 6),
)  # fmt: skip
_POINTER_SWAP_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3),
)  # fmt: skip
_POINTER_64 = ((64, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 128, 64, 4, 5), (64, 128, 64, 4, 7))
# Many small programs: one chain of mma.sync each.
# No pointer tile of 8 x 64: ptxas serialises its wgmma (warning C7515).
_NARROW_SWAP_8 = (
    (8, 16, 512, 1, 4), (8, 16, 512, 2, 4), (8, 16, 256, 2, 6), (8, 32, 256, 2, 5),
    (8, 32, 512, 4, 4),
)  # fmt: skip
_NARROW_SWAP_16 = (
    (16, 16, 512, 1, 4), (16, 16, 512, 4, 4), (16, 16, 256, 2, 6), (16, 32, 256, 2, 5),
    (16, 32, 512, 4, 4), (16, 64, 128, 4, 9), (16, 64, 256, 4, 5),
)  # fmt: skip
_NARROW_PLAIN_16 = (
    (16, 8, 512, 4, 4),
    (16, 16, 512, 2, 4),
    (16, 16, 256, 4, 6),
    (16, 32, 256, 4, 5),
)
_NARROW_32 = ((32, 16, 256, 4, 5), (32, 32, 256, 4, 4), (32, 32, 256, 4, 5), (32, 32, 128, 4, 6))
_NARROW_64 = (
    (64, 32, 256, 4, 3), (64, 32, 256, 4, 4), (64, 32, 128, 4, 7), (64, 16, 256, 4, 4),
    (32, 32, 256, 4, 5),
)  # fmt: skip

_DESCRIPTOR_SWAP_8 = ((8, 64, 128, 4, 6), (8, 64, 128, 4, 11), (8, 64, 256, 4, 5))
_DESCRIPTOR_SWAP_16 = (
    (16, 64, 128, 4, 6), (16, 64, 128, 4, 10), (16, 64, 256, 4, 5), (16, 128, 128, 4, 5),
)  # fmt: skip
_DESCRIPTOR_SWAP_32 = (
    (32, 64, 128, 4, 5), (32, 64, 128, 4, 8), (32, 64, 256, 4, 4), (32, 128, 64, 4, 7),
    (32, 128, 128, 4, 4),
)  # fmt: skip
_DESCRIPTOR_SWAP_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 6), (64, 128, 128, 4, 4),
    (64, 128, 64, 8, 6),
)  # fmt: skip
_DESCRIPTOR_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 5), (64, 128, 64, 4, 8),
    (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4),
)  # fmt: skip
_DESCRIPTOR_NARROW_64 = ((64, 32, 128, 4, 6), (64, 32, 256, 4, 4), (64, 16, 256, 4, 5))
_DESCRIPTOR_128 = (
    (128, 64, 64, 4, 6), (128, 64, 128, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip
_DESCRIPTOR_PAIRS = ((128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 64, 8, 3))
"""Tiles of which two programs fit a multiprocessor."""
_DESCRIPTOR_SWAP_128 = ((128, 64, 128, 4, 4), (128, 128, 64, 8, 5), (128, 128, 128, 8, 3))
_WARP_SPECIALISED_MANY = (
    (128, 256, 64, 4, 3), (128, 256, 64, 4, 4), (128, 128, 64, 4, 5), (128, 128, 64, 4, 6),
    (128, 192, 64, 4, 4), (128, 192, 64, 4, 5),
)  # fmt: skip
_DESCRIPTOR_MANY = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    (128, 128, 64, 8, 4), (128, 128, 128, 8, 3),
)  # fmt: skip
_DESCRIPTOR_MANY_SMALL = ((128, 64, 64, 4, 6), (64, 128, 64, 4, 6))
_POINTER_128 = ((64, 64, 128, 4, 4), (64, 128, 64, 4, 5))
_NARROW_MANY = ((128, 128, 64, 8, 3),)

# Row products.
_ROW_SWAP_16 = ((16, 64, 128, 4, 6), (16, 64, 256, 4, 5), (16, 128, 128, 4, 5))
_ROW_SWAP_32 = ((32, 64, 128, 4, 6), (32, 128, 128, 4, 4), (32, 128, 64, 4, 8))
_ROW_SWAP_64 = (
    (64, 64, 128, 4, 5), (64, 128, 128, 4, 4), (64, 128, 128, 8, 4), (64, 128, 64, 4, 7),
)  # fmt: skip
_ROW_SQUARE_64 = ((64, 128, 64, 4, 6),)
_ROW_LONG_64 = ((64, 256, 64, 4, 4),)
_ROW_SMALL_64 = ((64, 64, 128, 4, 5),)
_ROW_128 = ((128, 128, 64, 8, 4),)
_ROW_LARGEST = ((128, 256, 64, 8, 3),)
_ROW_WARP_SPECIALISED = ((128, 128, 64, 4, 5), (128, 128, 64, 4, 6))
_ROW_POINTER_SWAP_16 = ((16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 64, 256, 4, 4))
_ROW_POINTER_SWAP_32 = ((32, 64, 128, 4, 4),)

COLUMN_TILES = (
    TileRule((1, 8), NARROW, "pointer_swapped", _NARROW_SWAP_8),
    TileRule((1, 16), ALL, "pointer_swapped", _POINTER_SWAP_16),
    TileRule((1, 16), NARROW, "pointer_swapped", _NARROW_SWAP_16),
    TileRule((1, 16), NARROW, "pointer", _NARROW_PLAIN_16),
    TileRule((17, 32), ALL, "pointer_swapped", _POINTER_SWAP_32),
    TileRule((17, 32), NARROW, "pointer", _NARROW_32 + _NARROW_PLAIN_16),
    TileRule((33, 64), ALL, "pointer_swapped", _POINTER_SWAP_64),
    TileRule((33, 64), NARROW, "pointer_swapped", _POINTER_SWAP_32),
    TileRule((33, 64), ALL, "pointer", _POINTER_64),
    TileRule((33, 64), NARROW, "pointer", _NARROW_64),
    TileRule((65, 128), ALL, "pointer", _POINTER_128),
    TileRule((129, _NO_END), NARROW, "pointer", _NARROW_MANY),
    TileRule((1, 8), ALL, "descriptor_swapped", _DESCRIPTOR_SWAP_8),
    TileRule((1, 16), ALL, "descriptor_swapped", _DESCRIPTOR_SWAP_16),
    TileRule((17, 32), ALL, "descriptor_swapped", _DESCRIPTOR_SWAP_32),
    TileRule((17, 32), NARROW, "descriptor_swapped", _DESCRIPTOR_SWAP_16),
    TileRule((33, 64), ALL, "descriptor_swapped", _DESCRIPTOR_SWAP_64),
    TileRule((33, 64), NARROW, "descriptor_swapped", _DESCRIPTOR_SWAP_32),
    TileRule((33, 64), ALL, "descriptor", _DESCRIPTOR_64),
    TileRule((33, 64), NARROW, "descriptor", _DESCRIPTOR_NARROW_64),
    TileRule((65, 256), ALL, "descriptor", _DESCRIPTOR_64 + _DESCRIPTOR_128),
    TileRule((65, 256), ALL, "descriptor_swapped", _DESCRIPTOR_SWAP_128 + _DESCRIPTOR_SWAP_64),
    TileRule((65, 256), NARROW, "descriptor", _DESCRIPTOR_NARROW_64),
    TileRule((65, 256), _WIDER, "descriptor", _DESCRIPTOR_64[:3], 2),
    TileRule((129, 512), _WIDER, "descriptor", _DESCRIPTOR_PAIRS, 2),
    TileRule((257, _NO_END), ALL, "descriptor", _DESCRIPTOR_MANY),
    TileRule((257, 512), ALL, "descriptor", _DESCRIPTOR_MANY_SMALL),
    TileRule((513, _NO_END), _MIDDLE, "descriptor", _DESCRIPTOR_MANY_SMALL),
    TileRule((257, 512), ALL, "descriptor", _DESCRIPTOR_64 + _DESCRIPTOR_128),
    TileRule((129, _NO_END), ALL, "warp_specialised", _WARP_SPECIALISED_MANY),
)
"""In the order in which they are measured."""

_APART = {1: ("chain",)}
_FLAT = {1: ("chain",), 2: ("flat",), 4: ("flat",), 8: ("flat",)}
_BOTH = {1: ("chain",), 2: ("flat", "nested"), 4: ("flat", "nested"), 8: ("flat", "nested")}
_PAIRS = {1: ("chain",), 2: ("flat",)}  # the largest tile has no registers for a second chain
_WARPS = {2: ("gluon",), 4: ("gluon",), 8: ("gluon",)}

ROW_TILES = (
    TileRule((1, 16), ALL, "pointer_swapped", _ROW_POINTER_SWAP_16, kernels=_APART),
    TileRule((1, 64), ALL, "pointer_swapped", _ROW_POINTER_SWAP_32, kernels=_APART),
    TileRule((1, 16), ALL, "descriptor_swapped", _ROW_SWAP_16, kernels=_FLAT),
    TileRule((17, 32), ALL, "descriptor_swapped", _ROW_SWAP_32, kernels=_FLAT),
    TileRule((33, 128), ALL, "descriptor_swapped", _ROW_SWAP_64, kernels=_FLAT),
    TileRule((33, 512), ALL, "descriptor", _ROW_SQUARE_64, kernels=_FLAT),
    TileRule((33, 512), ALL, "descriptor", _ROW_LONG_64, kernels=_BOTH),
    TileRule((33, 512), ALL, "descriptor", _ROW_SMALL_64, kernels=_FLAT),
    TileRule((65, _NO_END), ALL, "descriptor", _ROW_128, kernels=_BOTH),
    TileRule((65, _NO_END), ALL, "descriptor", _ROW_LARGEST, kernels=_PAIRS),
    TileRule((129, _NO_END), ALL, "descriptor", _ROW_WARP_SPECIALISED, kernels=_WARPS),
)
"""In the order in which they are measured, a cut after another; equal estimates take the first."""
