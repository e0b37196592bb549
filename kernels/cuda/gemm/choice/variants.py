"""Which member of the GEMM bit class runs: a static table over rows, columns, K and dtype.

Every variant adds groups of 16 products in ascending K into one fp32 accumulator (Hopper's
`mma.sync.m16n8k16` and `wgmma.m64nNk16` are one arithmetic; fp32 is one fma at a time), so tiles,
warps, stages, operand swap and loads are free. Nothing is tuned at run time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

K_GROUP = 16
_GROUPS_OF_K = (512, 256, 128, 64, 32, 16)
_SPARE = 2048  # bytes of shared memory for barriers, where a tile goes by descriptors


@dataclass(frozen=True)
class Variant:
    """Tile [rows, columns] by `depth` of K. `swap` puts the weight's rows on the M side.

    descriptor: loads and stores by the tensor memory accelerator (compute capability 9.0), a
    persistent loop over tiles with `ctas` programs a multiprocessor; else pointer loads, one tile
    a program. halves: the store goes through shared memory in so many pieces. trades: by warps of
    several trades (`gluon_leaf_gemm`, Hopper alone).
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    descriptor: bool = False
    halves: int = 1
    ctas: int = 1
    trades: bool = False

    def at(self, k: int) -> "Variant":
        """The same with the largest depth that divides `k`: a tile never crosses the end of K."""
        depth = next(d for d in _GROUPS_OF_K if d <= self.depth and k % d == 0)
        return self if depth == self.depth else replace(self, depth=depth)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the stages of operands of two bytes."""
        return (self.rows + self.columns) * self.depth * 2 * self.stages

    def shared_bytes(self, size: int) -> int:
        """Shared memory in all: a descriptor stores a tile of values of `size` bytes from there."""
        if not self.descriptor:
            return self.stage_bytes
        return self.stage_bytes + self.rows * self.columns * size // self.halves + _SPARE


# fp32: fma chains, no tensor core.
_FLOAT32_FEW = Variant(16, 64, 32, 4, 3)
_FLOAT32_MANY = Variant(64, 64, 32, 8, 3)

_POINTER_16 = Variant(16, 64, 128, 4, 5, swap=True)
_POINTER_32 = Variant(32, 64, 128, 4, 4, swap=True)
_POINTER_64 = Variant(64, 64, 128, 4, 4, swap=True)
_POINTER_64_NARROW = Variant(64, 32, 128, 4, 4)  # few columns: more programs
_POINTER_64_WIDE = Variant(64, 128, 64, 4, 5)
_POINTER_128 = Variant(128, 128, 64, 8, 3)  # before Hopper

# (variant, share of the best tile's speed on a full multiprocessor)
_TILES = (
    (Variant(128, 256, 64, 8, 3, descriptor=True), 1.0),
    (Variant(128, 128, 64, 8, 4, descriptor=True), 0.8),
    (Variant(128, 64, 64, 4, 4, descriptor=True), 0.65),
    (Variant(64, 128, 64, 4, 5, descriptor=True), 0.65),
    (Variant(64, 64, 128, 4, 4, descriptor=True), 0.5),
)


def column_variant(m: int, n: int, k: int, *, float32: bool, wide_out: bool, sms: int) -> Variant:
    """For x [m, k], weight [n, k]; `wide_out`: the output is fp32; sms: 0 without descriptors."""
    return chain_variant(m, n, 1, float32=float32, wide_out=wide_out, sms=sms).at(k)


def every_variant(*, float32: bool, wide_out: bool, descriptors: bool) -> Iterator[Variant]:
    """All variants that a column or leaf product may use: one bit class, tested as one."""
    if float32:
        yield from (_FLOAT32_FEW, _FLOAT32_MANY)
        return
    yield from (_POINTER_16, replace(_POINTER_16, stages=4), _POINTER_32, _POINTER_64)
    yield from (_POINTER_64_NARROW, _POINTER_64_WIDE, _POINTER_128)
    if descriptors:
        yield from (_halved(tile, wide_out) for tile, _ in _TILES)


def chain_variant(
    m: int, n: int, leaves: int, *, float32: bool, wide_out: bool, sms: int
) -> Variant:
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
    return _halved(_least_time(_TILES, m, n, leaves, sms), wide_out)


def _halved(tile: Variant, wide_out: bool) -> Variant:
    """An fp32 tile of 128 x 256 does not fit beside the stages: store it in two pieces."""
    return replace(tile, halves=2) if wide_out and tile.columns == 256 else tile


def _least_time(
    tiles: tuple[tuple[Variant, float], ...], m: int, n: int, count: int, sms: int
) -> Variant:
    """The tile with the least waves * work per wave / speed; the first of equals."""

    def time(entry: tuple[Variant, float]) -> float:
        tile, speed = entry
        blocks = count * -(-m // tile.rows) * -(-n // tile.columns)
        return -(-blocks // sms) * tile.rows * tile.columns / speed

    return min(tiles, key=time)[0]
