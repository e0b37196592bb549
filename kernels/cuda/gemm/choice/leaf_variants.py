"""How a rank's leaves are cut over programs, and the tile that runs: a static choice by estimate.

A cut folds every subtree of `cut` leaves inside one program; what is left of the roots is for the
kernel that reads the sums. Cut 1 leaves all of it to the reader, a cut as wide as a root none. Few
programs want small cuts, many rows little memory traffic (whole roots). Every choice gives the same
bits. `leaf_candidates` lists those that won somewhere on an H200 and what lies beside them;
`leaf_choice` takes the least estimated time, for shapes that no table has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from tpdet.kernels.cuda.gemm.choice.root_form import FOLDS, fold_fits, root_form
from tpdet.kernels.cuda.gemm.choice.variants import Variant, chain_variant
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.order import Expression, operands

_LARGEST = 128 * 256  # a tile that fills the registers with two leaves
_FEW = 16  # rows up to which a product is one read of the weight

KERNELS = ("chain", *FOLDS, "gluon")
"""What may run a choice: "chain" for cut 1, else a kernel that folds; "gluon": of Hopper alone."""

# rows, columns, depth, warps, stages; SWAP: the weight's rows on the M side
_SWAP_16 = ((16, 64, 128, 4, 6), (16, 64, 256, 4, 5), (16, 128, 128, 4, 5))
_SWAP_32 = ((32, 64, 128, 4, 6), (32, 128, 128, 4, 4), (32, 128, 64, 4, 8))
_SWAP_64 = ((64, 64, 128, 4, 5), (64, 128, 128, 4, 4), (64, 128, 128, 8, 4), (64, 128, 64, 4, 7))
_PLAIN_64 = ((64, 128, 64, 4, 6), (64, 256, 64, 4, 4), (64, 64, 128, 4, 5))
_PLAIN_128 = ((128, 128, 64, 8, 4), (128, 256, 64, 8, 3))
_POINTER_SWAP_16 = ((16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 64, 256, 4, 4))
_POINTER_SWAP_32 = ((32, 64, 128, 4, 4),)
_GLUON = tuple(Variant(128, 128, 64, 4, stages, descriptor=True) for stages in (5, 6))


@dataclass(frozen=True)
class LeafChoice:
    """Subtrees of `cut` leaves a program, by `kernel`, one of KERNELS."""

    cut: int
    kernel: str
    tile: Variant


def leaf_variant(m: int, n: int, k: int, leaves: int, *, float32: bool, sms: int) -> Variant:
    """For `leaves` products x [m, k], weight [n, k] side by side, nothing folded."""
    return chain_variant(m, n, leaves, float32=float32, wide_out=True, sms=sms).at(k)


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
    apart = LeafChoice(1, "chain", leaf_variant(m, n, k, leaves, float32=float32, sms=sms))
    if float32 or not sms:
        return apart
    found = [
        choice
        for choice in leaf_candidates(m, n, k, leaves, roots)
        if choice.tile.descriptor and (choice.kernel != "gluon" or (wgmma and m > 256))
    ]
    if m <= _FEW:  # whole roots, if every program then reads enough
        deep = [c for c in found if c.cut >= 4 and c.tile.depth == 256]
        return max(deep, key=lambda c: c.cut, default=apart)
    return min(found, key=lambda c: estimate(c, m, n, k, leaves, sms), default=apart)


def leaf_candidates(
    m: int, n: int, k: int, leaves: int, roots: tuple[Expression, ...]
) -> Iterator[LeafChoice]:
    """Every choice worth measuring for m rows on a GPU with descriptors."""
    for tile in dict.fromkeys(tile.at(k) for tile in _pointer_tiles(m)):
        yield LeafChoice(1, "chain", tile)
    tiles = tuple(dict.fromkeys(tile.at(k) for tile in _tiles(m)))
    for cut in (1, 2, 4, 8):
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is None:
            continue
        for tile in tiles:
            for kernel in ("chain",) if cut == 1 else _kernels(tile, cut):
                fits = cut == 1 or fold_fits(form, k, tile, kernel)
                if fits and tile.shared_bytes(4) <= H200.shared_bytes:
                    yield LeafChoice(cut, kernel, tile)
        for tile in _GLUON if cut > 1 and m > 128 else ():
            if fold_fits(form, k, tile, "gluon"):
                yield LeafChoice(cut, "gluon", tile)


def _kernels(tile: Variant, cut: int) -> tuple[str, ...]:
    """Those worth measuring: the largest tile has no registers for pairs, or for a second chain."""
    area = tile.rows * tile.columns
    if area >= _LARGEST:
        return ("flat",) if cut == 2 else ()
    return ("flat", "nested") if area == _LARGEST // 2 else ("flat",)


def estimate(choice: LeafChoice, m: int, n: int, k: int, leaves: int, sms: int) -> float:
    """Microseconds for the product and the reader's pass over its sums, on an H200."""
    tile, units = choice.tile, leaves // choice.cut
    blocks = units * -(-m // tile.rows) * -(-n // tile.columns)
    waves = -(-blocks // (sms * tile.ctas))
    area = tile.rows * tile.columns / _LARGEST
    compute = 2 * tile.rows * tile.columns * tile.depth / (5.9e6 * _speed(tile))
    load = (tile.rows + tile.columns) * tile.depth * 2 / 65e3
    steps = choice.cut * k // tile.depth
    step = max(compute, load) * _STEP[choice.kernel]
    ends = choice.cut * area * _END[choice.kernel] + 0.3 + 3.0 * area
    program = waves * (steps * step + ends)
    weight = leaves * n * k * 2 / 4.2e6
    reader = 8 * units * m * n / 5e6
    return 2.5 + max(program, weight) + 0.1 * min(program, weight) + reader


# flat finds at every step which leaf it is in; nested begins its loads anew at every leaf.
_STEP = {"chain": 1.0, "flat": 1.0, "nested": 0.82, "gluon": 0.75}
_END = {"chain": 0.0, "flat": 0.6, "nested": 2.4, "gluon": 0.1}
_SPEED = {(128, 256): 1.0, (128, 128): 0.82, (64, 256): 0.8}


def _speed(tile: Variant) -> float:
    """Share of the tensor cores' measured speed that a tile reaches."""
    small = 0.65 if tile.rows * tile.columns >= 64 * 128 else 0.45
    return _SPEED.get((tile.rows, tile.columns), small * min(1.0, tile.rows / 64))


def _tiles(m: int) -> Iterator[Variant]:
    swapped = _SWAP_16 if m <= 16 else _SWAP_32 if m <= 32 else _SWAP_64 if m <= 128 else ()
    plain = () if m <= 32 else _PLAIN_64 if m <= 64 else _PLAIN_64 + _PLAIN_128
    for size in swapped:
        yield Variant(*size, swap=True, descriptor=True)
    for size in plain if m <= 512 else _PLAIN_128:
        yield _halved(Variant(*size, descriptor=True))


def _pointer_tiles(m: int) -> Iterator[Variant]:
    few = _POINTER_SWAP_16 + _POINTER_SWAP_32 if m <= 16 else _POINTER_SWAP_32 if m <= 64 else ()
    for size in few:
        yield Variant(*size, swap=True)


def _halved(tile: Variant) -> Variant:
    """The largest tiles' fp32 output does not fit beside the stages: store it in two pieces."""
    return replace(tile, halves=2) if tile.rows * tile.columns >= _LARGEST else tile
