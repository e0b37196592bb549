"""How a rank's leaves are cut over programs, and the tile that runs: a static choice by estimate.

A cut folds every subtree of `cut` leaves inside one program; what is left of the roots is for the
kernel that reads the sums. Cut 1 leaves all of it to the reader, a cut as wide as a root none. Few
programs want small cuts, many rows little memory traffic (whole roots). Every choice gives the same
bits. `leaf_candidates` lists those that won somewhere on an H200 and what lies beside them;
`leaf_choice` takes the least estimated time, for shapes that no table has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from tpdet.kernels.cuda.gemm.choice.candidate_tiles import ROW_TILES
from tpdet.kernels.cuda.gemm.choice.candidates import within
from tpdet.kernels.cuda.gemm.choice.static import chain_tile
from tpdet.kernels.cuda.gemm.choice.variants import CHAIN, FOLDS, variant_of
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Shape
from tpdet.kernels.order import Expression, operands

_LARGEST = 128 * 256  # a tile that fills the registers with two leaves
_FEW = 16  # rows up to which a product is one read of the weight
_CUTS = (1, 2, 4, 8)
_FLOAT32_BYTES = 4

# Rates of an H200 by which choices are estimated, in operations or bytes a microsecond.
_TILE_OPERATIONS = 5.9e6  # of one multiprocessor by the largest tile
_TILE_LOADS = 65e3  # of one multiprocessor
_WEIGHT_BYTES = 4.2e6
_SUM_BYTES = 5e6


@dataclass(frozen=True)
class LeafChoice:
    """Subtrees of `cut` leaves a program, by `kernel`, one of KERNELS."""

    cut: int
    kernel: str
    tile: Tile


def leaf_tile(m: int, n: int, k: int, leaves: int, *, float32: bool, sms: int) -> Tile:
    """For `leaves` products x [m, k], weight [n, k] side by side, nothing folded."""
    return chain_tile(m, n, leaves, float32=float32, wide_out=True, sms=sms).at(k)


@cache
def cut_roots(
    roots: tuple[Expression, ...], cut: int
) -> tuple[tuple[Expression, ...], tuple[Expression, ...]] | None:
    """Subtrees of exactly `cut` leaves that cover the roots, and the roots over their indices.

    None if the roots have no such cut.
    """
    units: list[Expression] = []

    def over_units(node: Expression) -> Expression | None:
        size = len(operands(node))
        if size == cut:
            units.append(node)
            return len(units) - 1
        if isinstance(node, int) or size < cut:
            return None
        left = over_units(node[0])
        right = None if left is None else over_units(node[1])
        return None if left is None or right is None else (left, right)

    rest = [over_units(root) for root in roots]
    found = tuple(root for root in rest if root is not None)
    return (tuple(units), found) if len(found) == len(roots) else None


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
    wgmma: bool = True,
) -> LeafChoice:
    """For x [m, leaves * k], weight [leaves, n, k]; sms: 0 without descriptors.

    wgmma: whether the GPU has Hopper's matrix instruction, which one kernel calls by name.
    """
    apart = LeafChoice(1, CHAIN, leaf_tile(m, n, k, leaves, float32=float32, sms=sms))
    if float32 or not sms:
        return apart
    found = [
        choice
        for choice in leaf_candidates(m, n, k, leaves, roots)
        if variant_of(choice.tile).descriptors and _runs_unmeasured(choice, m, wgmma)
    ]
    if m <= _FEW:  # whole roots, if every program then reads enough
        deep = [c for c in found if c.cut >= 4 and c.tile.depth == 256]
        return max(deep, key=lambda c: c.cut, default=apart)
    return min(found, key=lambda c: estimate(c, m, n, k, leaves, sms), default=apart)


def leaf_candidates(
    m: int, n: int, k: int, leaves: int, roots: tuple[Expression, ...]
) -> Iterator[LeafChoice]:
    """Every choice worth measuring for m rows on a GPU with descriptors, without repeats."""
    shape = Shape(m, n, k, leaves, _FLOAT32_BYTES)
    found: dict[LeafChoice, None] = {}
    for cut in _CUTS:
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is not None:
            found |= dict.fromkeys(_candidates_of_cut(cut, form, shape))
    yield from found


def _candidates_of_cut(cut: int, form: RootForm, shape: Shape) -> Iterator[LeafChoice]:
    for rule in ROW_TILES:
        if not within(shape.m, rule.rows):
            continue
        for size in rule.tiles:
            tile = Tile(*size, rule.variant).at(shape.k)
            for kernel in rule.kernels.get(cut, ()):
                choice = LeafChoice(cut, kernel, tile.storing(_FLOAT32_BYTES))
                if _fits(choice, form, shape):
                    yield choice


def _fits(choice: LeafChoice, form: RootForm, shape: Shape) -> bool:
    """Whether its kernel computes the shape, whose subtrees have the form, by its tile."""
    if choice.kernel == CHAIN:
        return variant_of(choice.tile).fits(shape, choice.tile)
    return FOLDS[choice.kernel].fits(form, shape.k, choice.tile)


def _runs_unmeasured(choice: LeafChoice, m: int, wgmma: bool) -> bool:
    """Whether a choice may run without a shape table that measured it."""
    fold = FOLDS.get(choice.kernel)
    return fold is None or (m >= fold.static_rows and (wgmma or not fold.wgmma))


def estimate(choice: LeafChoice, m: int, n: int, k: int, leaves: int, sms: int) -> float:
    """Microseconds for the product and the reader's pass over its sums, on an H200."""
    tile, units = choice.tile, leaves // choice.cut
    fold = FOLDS.get(choice.kernel)
    step_cost, leaf_cost = (1.0, 0.0) if fold is None else (fold.step_cost, fold.leaf_cost)
    blocks = units * -(-m // tile.rows) * -(-n // tile.columns)
    waves = -(-blocks // (sms * tile.ctas))
    area = tile.rows * tile.columns / _LARGEST
    compute = 2 * tile.rows * tile.columns * tile.depth / (_TILE_OPERATIONS * _speed(tile))
    load = (tile.rows + tile.columns) * tile.depth * 2 / _TILE_LOADS
    steps = choice.cut * k // tile.depth
    step = max(compute, load) * step_cost
    ends = choice.cut * area * leaf_cost + 0.3 + 3.0 * area
    program = waves * (steps * step + ends)
    weight = leaves * n * k * 2 / _WEIGHT_BYTES
    reader = 8 * units * m * n / _SUM_BYTES
    return 2.5 + max(program, weight) + 0.1 * min(program, weight) + reader


_SPEED = {(128, 256): 1.0, (128, 128): 0.82, (64, 256): 0.8}


def _speed(tile: Tile) -> float:
    """Share of the tensor cores' measured speed that a tile reaches."""
    small = 0.65 if tile.rows * tile.columns >= 64 * 128 else 0.45
    return _SPEED.get((tile.rows, tile.columns), small * min(1.0, tile.rows / 64))
