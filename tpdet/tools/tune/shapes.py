"""The products of well-known models at given tensor-parallel sizes."""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from tpdet.errors import UsageError
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS, ROW_LAYERS
from tpdet.models.products import expert_layer, table_products
from tpdet.tools.worlds.shapes import cut_for, find_model


class Expert(NamedTuple):
    """A layer's experts, the activation of their gates and whether they have biases."""

    layer: ExpertLayer
    activation: str = "silu"
    biased: bool = False


def products_by_value(
    names: Iterable[str], ranks: Iterable[int], orders: Iterable[str], row_layers: Iterable[str]
) -> tuple[tuple[Product, ...], tuple[str, ...]]:
    """Products of each model at each size, without repeats; and why sizes were left out.

    In the order of names, then of sizes. A model leaves out sizes that do not fit it, as long as
    one does. Raises UsageError for one that none fits, NotFoundError for an unknown model.
    """
    products: dict[Product, None] = {}
    left_out = []
    sizes, orders, rules = tuple(ranks), tuple(orders), tuple(row_layers)
    for name in names:
        refused = []
        for size in sizes:
            try:
                products |= dict.fromkeys(_products_of(name, size, orders, rules))
            except UsageError as error:
                refused.append(f"{name}: {error}")
        if len(refused) == len(sizes):
            raise UsageError(refused[0])
        left_out += refused
    return tuple(products), tuple(left_out)


def _products_of(
    name: str, size: int, orders: tuple[str, ...], rules: tuple[str, ...]
) -> tuple[Product, ...]:
    products: tuple[Product, ...] = ()
    if "fold" in rules:
        products += tuned_products([name], [size]) + tuned_row_products([name], [size], orders)
    if "gather" in rules:
        products += tuned_gathered_products([name], [size])
    return products


def expert_layers(names: Iterable[str], ranks: Iterable[int]) -> tuple[Expert, ...]:
    """Layers of whole experts of each model at each size that fits, without repeats.

    In the order of names, then of sizes. Raises NotFoundError for an unknown model.
    """
    experts: dict[Expert, None] = {}
    sizes = tuple(ranks)
    for name in names:
        config = find_model(name)
        mixture = config.mixture
        for size in sizes if mixture is not None else ():
            try:
                partition = cut_for(config, size, DEFAULT_FOLD_ORDER)
            except UsageError:  # `products_by_value` says which
                continue
            layer = expert_layer(partition)
            if layer is not None and mixture is not None:
                experts[Expert(layer, mixture.activation, mixture.biased)] = None
    return tuple(experts)


def tuned_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """All but row products of the models on every rank, without repeats.

    Raises NotFoundError for an unknown model, UsageError for a number of ranks that does not fit.
    """
    return _products(names, ranks, (DEFAULT_FOLD_ORDER,), ("column", "gated", "head"))


def tuned_row_products(
    names: Iterable[str], ranks: Iterable[int], orders: Iterable[str] = FOLD_ORDERS
) -> tuple[Product, ...]:
    """Row products on every rank in each fold order, once each. Raises as `tuned_products`."""
    return _products(names, ranks, orders, ("row",))


def tuned_gathered_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """What gathered row layers multiply beside `tuned_products`, once each. Raises as it."""
    models, sizes = tuple(names), tuple(ranks)
    known, gathered = (
        _products(models, sizes, (DEFAULT_FOLD_ORDER,), ("column",), rule) for rule in ROW_LAYERS
    )
    return tuple(product for product in gathered if product not in known)


def _products(
    names: Iterable[str],
    sizes: Iterable[int],
    orders: Iterable[str],
    kinds: tuple[str, ...],
    row_layers: str = "fold",
) -> tuple[Product, ...]:
    products: set[Product] = set()
    ranks = [(size, rank) for size in sizes for rank in range(size)]
    for name in names:
        config = find_model(name)
        for (size, rank), order in product(ranks, orders):
            partition = cut_for(config, size, order, rank=rank, row_layers=row_layers)
            of_rank = table_products(partition)
            products |= {p for p in of_rank if p.kind in kinds and not p.widths}  # these: one way
    return tuple(sorted(products))
