"""The static choice: which tile runs where no shape table was admitted and no tile has costs.

Every variant adds groups of 16 products in ascending K into one fp32 accumulator (Hopper's
`mma.sync.m16n8k16` and `wgmma.m64nNk16` are one arithmetic; fp32 is one fma at a time), so tiles,
warps, stages, operand swap and loads are free. Nothing is tuned at run time: for many rows, times
are estimated by a tile's area, with rates that were measured on an H200.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.choice.variants import CHAIN, FOLDS, variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.order import Expression

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

_FEW = 16  # rows up to which a product is one read of the weight
_LARGEST = 128 * 256  # a tile that fills the registers with two leaves

# Rates by which leaves are estimated, in operations or bytes a microsecond.
_TILE_OPERATIONS = 5.9e6  # of one multiprocessor by the largest tile
_TILE_LOADS = 65e3  # of one multiprocessor
_WEIGHT_BYTES = 4.2e6
_SUM_BYTES = 5e6
_SPEED = {(128, 256): 1.0, (128, 128): 0.82, (64, 256): 0.8}


def column_tile(m: int, n: int, k: int, *, float32: bool, wide_out: bool, sms: int) -> Tile:
    """The tile for x [m, k], weight [n, k]; wide_out: to fp32; sms: 0 without descriptors."""
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
    """The tile of `leaves` products of m rows by n columns; its depth may not divide K yet."""
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
        return -(-tile.blocks(m, n, count) // sms) * tile.area / speed

    return min(tiles, key=time)[0]


def leaf_tile(m: int, n: int, k: int, leaves: int, *, float32: bool, sms: int) -> Tile:
    """The tile of `leaves` products x [m, k], weight [n, k] side by side, nothing folded."""
    return chain_tile(m, n, leaves, float32=float32, wide_out=True, sms=sms).at(k)


@lru_cache(maxsize=4096)
def leaf_choice(
    m: int,
    n: int,
    k: int,
    leaves: int,
    roots: tuple[Expression, ...],
    *,
    float32: bool,
    sms: int,
    gpu: Gpu,
) -> LeafChoice:
    """The choice for x [m, leaves * k], weight [leaves, n, k]; sms: 0 without descriptors."""
    apart = LeafChoice(1, CHAIN, leaf_tile(m, n, k, leaves, float32=float32, sms=sms))
    if float32 or not sms:
        return apart
    choices = [
        choice
        for choice in leaf_candidates(m, n, k, leaves, roots, gpu)
        if variant_of(choice.tile).descriptors and _runs_unmeasured(choice, m, gpu)
    ]
    if m <= _FEW:  # whole roots, if every program then reads enough
        deep = [c for c in choices if c.cut >= 4 and c.tile.depth == 256]
        return max(deep, key=lambda c: c.cut, default=apart)
    return min(choices, key=lambda c: _leaf_time(c, m, n, k, leaves, sms), default=apart)


def _runs_unmeasured(choice: LeafChoice, m: int, gpu: Gpu) -> bool:
    """Whether a choice may run without a shape table that measured it."""
    fold = FOLDS.get(choice.kernel)
    return fold is None or (m >= fold.static_rows and (gpu.wgmma or not fold.wgmma))


def _leaf_time(choice: LeafChoice, m: int, n: int, k: int, leaves: int, sms: int) -> float:
    """Microseconds for the product and the reader's pass over its sums."""
    tile, units, fold = choice.tile, leaves // choice.cut, FOLDS.get(choice.kernel)
    step_cost, leaf_cost = (1.0, 0.0) if fold is None else (fold.step_cost, fold.leaf_cost)
    waves, share = -(-tile.blocks(m, n, units) // (sms * tile.ctas)), tile.area / _LARGEST
    compute = 2 * tile.area * tile.depth / (_TILE_OPERATIONS * _speed(tile))
    load = (tile.rows + tile.columns) * tile.depth * 2 / _TILE_LOADS
    steps = choice.cut * k // tile.depth
    step = max(compute, load) * step_cost
    ends = choice.cut * share * leaf_cost + 0.3 + 3.0 * share
    program = waves * (steps * step + ends)
    weight = leaves * n * k * 2 / _WEIGHT_BYTES
    reader = 8 * units * m * n / _SUM_BYTES
    return 2.5 + max(program, weight) + 0.1 * min(program, weight) + reader


def _speed(tile: Tile) -> float:
    """Share of the tensor cores' measured speed that a tile reaches."""
    small = 0.65 if tile.area >= 64 * 128 else 0.45
    return _SPEED.get((tile.rows, tile.columns), small * min(1.0, tile.rows / 64))
