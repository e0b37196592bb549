"""All GEMM variants by name: the dict that candidates, the shape table and the launches read."""

from tpdet.kernels.cuda.gemm.variants import (
    descriptor,
    leaf_fold,
    pointer,
    warp_specialised_launch,
    warp_swapped,
)
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, Variant

_ALL: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        pointer.POINTER,
        pointer.POINTER_SWAPPED,
        descriptor.DESCRIPTOR,
        descriptor.DESCRIPTOR_SWAPPED,
        warp_specialised_launch.WARP_SPECIALISED,
        warp_swapped.WARP_SWAPPED,
    )
}
VARIANTS = {name: variant for name, variant in _ALL.items() if variant.dense}
"""One chain a leaf: column products, heads, and the leaves of row products apart."""

EXPERT_VARIANTS = {name: variant for name, variant in _ALL.items() if variant.experts}
"""Products of experts over blocks of rows."""

FOLDS: dict[str, Fold] = {
    fold.name: fold
    for fold in (leaf_fold.FLAT, leaf_fold.NESTED, warp_specialised_launch.WARP_SPECIALISED_FOLD)
}
"""Leaves folded inside the program that made them."""

CHAIN = "chain"
"""What the shape table calls leaves that are not folded: their tile's variant computes each."""

KERNELS = (CHAIN, *FOLDS)
"""What may run a row product, as in the shape table."""


def variant_of(tile: Tile) -> Variant:
    """The variant that runs a tile."""
    return _ALL[tile.variant]
