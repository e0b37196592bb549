"""Tiles worth measuring for a product: those of the data beside this file that fit it."""

from tpdet.kernels.cuda.gemm.choice.candidate_tiles import COLUMN_TILES
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Shape
from tpdet.kernels.inputs.activations import GATED_KINDS


def column_candidates(m: int, n: int, k: int, *, kind: str, descriptors: bool) -> tuple[Tile, ...]:
    """Tiles worth measuring for `m` rows (a bucket) of a product [n, k] of one leaf, by its kind.

    Without repeats, each with a depth that divides k, none over the shared memory.
    """
    shape = Shape(m, n, k, 1, 4 if kind == "head" else 2, kind in GATED_KINDS)
    found = (
        Tile(*size, rule.variant, ctas=rule.ctas).at(k).storing(shape.out_bytes)
        for rule in COLUMN_TILES
        if within(m, rule.rows) and within(n, rule.columns)
        for size in rule.tiles
    )
    return tuple(
        dict.fromkeys(
            tile
            for tile in found
            if variant_of(tile).fits(shape, tile)
            and (descriptors or not variant_of(tile).descriptors)
        )
    )


def within(value: int, bounds: tuple[int, int]) -> bool:
    """Whether a value is in bounds that are both included."""
    return bounds[0] <= value <= bounds[1]
