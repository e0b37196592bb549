"""Choices for products that no shape table holds: at each bucket, the least estimated time.

The candidates are those that the tuner measures and whose tiles have costs. Start-up tries what is
named here as it tries a table's entries, so a wrong estimate costs time and never a bit.
"""

from collections.abc import Iterator
from functools import cache

from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, Choice
from tpdet.kernels.cuda.gemm.choice.tile_costs import (
    Work,
    cost_of,
    load_of,
    microseconds,
    tile_costs,
)
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.inputs.product import Product, read_roots

Estimated = tuple[float, Choice]
"""Microseconds, and for what."""


def estimated_choices(product: Product, most_rows: int, gpu: Gpu) -> dict[int, Choice]:
    """The choice at each bucket that row counts up to `most_rows` fall into, on a Hopper GPU.

    A bucket without a candidate that has costs is left out; empty if every one is.
    """
    found = {}
    for at, bucket in enumerate(BUCKETS):
        if at and BUCKETS[at - 1] >= most_rows:
            break
        ranked = estimates(product, bucket, gpu)
        if ranked:
            found[bucket] = ranked[0][1]
    return found


@cache
def estimates(product: Product, bucket: int, gpu: Gpu) -> tuple[Estimated, ...]:
    """All candidates of a bucket that have costs, the least time first; equals as listed."""
    found = _row_estimates if product.kind == "row" else _column_estimates
    return tuple(sorted(found(product, bucket, gpu), key=lambda entry: entry[0]))


def _column_estimates(product: Product, bucket: int, gpu: Gpu) -> Iterator[Estimated]:
    kind, n, k = product.kind, product.n, product.k
    costs, work = tile_costs(gpu.name), Work(kind, bucket, n, k)
    for tile in column_candidates(bucket, n, k, kind=kind, descriptors=True):
        cost = cost_of(costs, work, "", tile)
        if cost is not None:
            yield microseconds(cost, load_of(tile, work, gpu.multiprocessors)), Choice(bucket, tile)


def _row_estimates(product: Product, bucket: int, gpu: Gpu) -> Iterator[Estimated]:
    costs, (n, k, leaves) = tile_costs(gpu.name), (product.n, product.k, product.leaves)
    for found in leaf_candidates(bucket, n, k, leaves, read_roots(product.roots)):
        work = Work("row", bucket, n, k, leaves // found.cut, found.cut)
        cost = cost_of(costs, work, found.kernel, found.tile)
        if cost is not None:
            choice = Choice(bucket, found.tile, None, found.cut, found.kernel)
            yield microseconds(cost, load_of(found.tile, work, gpu.multiprocessors)), choice
