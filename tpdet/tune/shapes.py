"""The products of well-known models at given tensor-parallel sizes."""

from collections.abc import Iterable
from itertools import product

from tpdet.bench.report.shapes import cut_for, named_config
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS, ROW_LAYERS
from tpdet.models.products import rank_products

Place = tuple[int, int]
"""Ranks of a world, and one of them."""


def tuned_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """All but row products of the named shapes over each number of ranks, without repeats.

    Raises UsageError for an unknown name or a number of ranks that does not fit the model.
    """
    places = [(size, 0) for size in ranks]
    return _products(names, places, (DEFAULT_FOLD_ORDER,), ("column", "gated", "head"))


def tuned_row_products(
    names: Iterable[str], ranks: Iterable[int], orders: Iterable[str] = FOLD_ORDERS
) -> tuple[Product, ...]:
    """Row products of the named shapes on every rank in each fold order, without repeats.

    Raises UsageError as `tuned_products`.
    """
    places = [(size, rank) for size in ranks for rank in range(size)]
    return _products(names, places, orders, ("row",))


def tuned_gathered_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """What gathered row layers multiply in addition to `tuned_products`, without repeats.

    Raises UsageError as `tuned_products`.
    """
    models, places = tuple(names), [(size, 0) for size in ranks]
    known, gathered = (
        _products(models, places, (DEFAULT_FOLD_ORDER,), ("column",), rule) for rule in ROW_LAYERS
    )
    return tuple(product for product in gathered if product not in known)


def _products(
    names: Iterable[str],
    places: Iterable[Place],
    orders: Iterable[str],
    kinds: tuple[str, ...],
    row_layers: str = "fold",
) -> tuple[Product, ...]:
    found: set[Product] = set()
    for name in names:
        config = named_config(name)
        for (size, rank), order in product(places, orders):
            partition = cut_for(config, size, order, rank=rank, row_layers=row_layers)
            found |= {p for p in rank_products(partition) if p.kind in kinds}
    return tuple(sorted(found))
