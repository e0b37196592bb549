"""The static choice: which tile runs where no shape table was admitted, by rows, columns and dtype.

Every variant adds groups of 16 products in ascending K into one fp32 accumulator (Hopper's
`mma.sync.m16n8k16` and `wgmma.m64nNk16` are one arithmetic; fp32 is one fma at a time), so tiles,
warps, stages, operand swap and loads are free. Nothing is tuned at run time.
"""

from collections.abc import Iterator
from dataclasses import replace

from tpdet.kernels.cuda.gemm.variants.tile import Tile

# fp32: fma chains, no tensor core.
_FLOAT32_FEW = Tile(16, 64, 32, 4, 3)
_FLOAT32_MANY = Tile(64, 64, 32, 8, 3)

_POINTER_16 = Tile(16, 64, 128, 4, 5, "pointer_swapped")
_POINTER_32 = Tile(32, 64, 128, 4, 4, "pointer_swapped")
_POINTER_64 = Tile(64, 64, 128, 4, 4, "pointer_swapped")
_POINTER_64_NARROW = Tile(64, 32, 128, 4, 4)  # few columns: more programs
_POINTER_64_WIDE = Tile(64, 128, 64, 4, 5)
_POINTER_128 = Tile(128, 128, 64, 8, 3)  # before Hopper

# (tile, share of the best tile's speed on a full multiprocessor)
_TILES = (
    (Tile(128, 256, 64, 8, 3, "descriptor"), 1.0),
    (Tile(128, 128, 64, 8, 4, "descriptor"), 0.8),
    (Tile(128, 64, 64, 4, 4, "descriptor"), 0.65),
    (Tile(64, 128, 64, 4, 5, "descriptor"), 0.65),
    (Tile(64, 64, 128, 4, 4, "descriptor"), 0.5),
)


def column_tile(m: int, n: int, k: int, *, float32: bool, wide_out: bool, sms: int) -> Tile:
    """For x [m, k], weight [n, k]; `wide_out`: the output is fp32; sms: 0 without descriptors."""
    return chain_tile(m, n, 1, float32=float32, wide_out=wide_out, sms=sms).at(k)


def static_tiles(*, float32: bool, wide_out: bool, descriptors: bool) -> Iterator[Tile]:
    """All tiles that a column or leaf product may use: one bit class, tested as one."""
    if float32:
        yield from (_FLOAT32_FEW, _FLOAT32_MANY)
        return
    yield from (_POINTER_16, replace(_POINTER_16, stages=4), _POINTER_32, _POINTER_64)
    yield from (_POINTER_64_NARROW, _POINTER_64_WIDE, _POINTER_128)
    if descriptors:
        yield from (tile.storing(4 if wide_out else 2) for tile, _ in _TILES)


def chain_tile(m: int, n: int, leaves: int, *, float32: bool, wide_out: bool, sms: int) -> Tile:
    """For `leaves` products of m rows by n columns side by side; its depth may not divide K yet."""
    if float32:
        return _FLOAT32_FEW if m <= 16 else _FLOAT32_MANY
    if m <= 16:
        return _POINTER_16 if n * leaves <= 6144 else replace(_POINTER_16, stages=4)
    if m <= 64 and n * leaves <= 3072:
        return _POINTER_64_NARROW
    if m <= 32:
        return _POINTER_32
    if m <= 64:
        return _POINTER_64 if n * leaves < 12288 else _POINTER_64_WIDE
    if not sms:
        return _POINTER_128
    return _least_time(_TILES, m, n, leaves, sms).storing(4 if wide_out else 2)


def _least_time(
    tiles: tuple[tuple[Tile, float], ...], m: int, n: int, count: int, sms: int
) -> Tile:
    """The tile with the least waves * work per wave / speed; the first of equals."""

    def time(entry: tuple[Tile, float]) -> float:
        tile, speed = entry
        blocks = count * -(-m // tile.rows) * -(-n // tile.columns)
        return -(-blocks // sms) * tile.rows * tile.columns / speed

    return min(tiles, key=time)[0]
