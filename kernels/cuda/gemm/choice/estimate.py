"""Choices for products that no shape table holds: at each bucket, the least estimated time.

The candidates are those that the tuner measures and whose tiles have costs. Start-up tries what is
named here as it tries a table's entries, so a wrong estimate costs time and never a bit.
"""

from collections.abc import Iterator
from functools import cache

from tpdet.kernels.cuda.cost.model import TileWork, microseconds
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates, leaf_candidates
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, ProductChoice
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.inputs.product import Product, read_roots

EstimatedChoice = tuple[float, ProductChoice]
"""Microseconds, and for what."""


def estimated_choices(product: Product, most_rows: int, gpu: Gpu) -> dict[int, ProductChoice]:
    """The choice at each bucket that row counts up to `most_rows` fall into, on a Hopper GPU.

    A bucket without a candidate that has costs is left out; empty if every one is.
    """
    choices = {}
    for at, bucket in enumerate(BUCKETS):
        if at and BUCKETS[at - 1] >= most_rows:
            break
        ranked = estimates(product, bucket, gpu)
        if ranked:
            choices[bucket] = ranked[0][1]
    return choices


@cache
def estimates(product: Product, bucket: int, gpu: Gpu) -> tuple[EstimatedChoice, ...]:
    """All candidates of a bucket that have costs, the least time first; equals as listed."""
    timed = ((microseconds(gpu, work), each) for work, each in _candidates(product, bucket, gpu))
    known = [(us, choice) for us, choice in timed if us is not None]
    return tuple(sorted(known, key=lambda entry: entry[0]))


def _candidates(
    product: Product, bucket: int, gpu: Gpu
) -> Iterator[tuple[TileWork, ProductChoice]]:
    """What each candidate of a bucket computes, and as what it would be chosen."""
    kind, n, k, leaves = product.kind, product.n, product.k, product.leaves
    if kind != "row":
        for tile in column_candidates(bucket, n, k, kind, gpu):
            yield TileWork(tile, kind, bucket, n, k), ProductChoice(bucket, tile)
        return
    for leaf in leaf_candidates(bucket, n, k, leaves, read_roots(product.roots), gpu):
        cut, kernel, tile = leaf.cut, leaf.kernel, leaf.tile
        work = TileWork(tile, kind, bucket, n, k, leaves // cut, cut, kernel)
        yield work, ProductChoice(bucket, tile, None, cut, kernel)
