"""All GEMM variants by name: the dict that candidates, the shape table and the launches read."""

from tpdet.kernels.cuda.gemm.variants import (
    descriptor,
    leaf_fold,
    pointer,
    swapped,
    warp_specialised_launch,
)
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, Variant

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        pointer.POINTER,
        pointer.POINTER_SWAPPED,
        descriptor.DESCRIPTOR,
        swapped.DESCRIPTOR_SWAPPED,
        warp_specialised_launch.WARP_SPECIALISED,
    )
}
"""One chain a leaf: column products, heads, and the leaves of row products apart."""

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
    return VARIANTS[tile.variant]
