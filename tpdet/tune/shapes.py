"""The products of well-known models at given tensor-parallel sizes."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import cast

from tpdet.comm.world.world import World
from tpdet.kernels.cuda.gemm.choice.shape_table import Product
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS, ROW_LAYERS
from tpdet.layers.partition import make_partition
from tpdet.layers.product_shapes import rank_products
from tpdet.model_config import load_model_config
from tpdet.synthetic.model_shapes import write_shape


@dataclass(frozen=True)
class _Place:
    """A rank of a world that is not there: enough to cut a model."""

    size: int
    rank: int = 0
    timeout: float = 0.0


def tuned_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """Column and head products of the named shapes over each number of ranks, without repeats.

    Raises UsageError for an unknown name or a number of ranks that does not fit the model.
    """
    places = [_Place(size) for size in ranks]
    return _products(names, places, (DEFAULT_FOLD_ORDER,), ("column", "head"))


def tuned_row_products(
    names: Iterable[str], ranks: Iterable[int], orders: Iterable[str] = FOLD_ORDERS
) -> tuple[Product, ...]:
    """Row products of the named shapes on every rank in each fold order, without repeats.

    Raises UsageError as `tuned_products`.
    """
    places = [_Place(size, rank) for size in ranks for rank in range(size)]
    return _products(names, places, orders, ("row",))


def tuned_gathered_products(names: Iterable[str], ranks: Iterable[int]) -> tuple[Product, ...]:
    """What gathered row layers multiply in addition to `tuned_products`, without repeats.

    Raises UsageError as `tuned_products`.
    """
    models, places = tuple(names), [_Place(size) for size in ranks]
    known, gathered = (
        _products(models, places, (DEFAULT_FOLD_ORDER,), ("column",), rule) for rule in ROW_LAYERS
    )
    return tuple(product for product in gathered if product not in known)


def _products(
    names: Iterable[str],
    places: Iterable[_Place],
    orders: Iterable[str],
    kinds: tuple[str, ...],
    row_layers: str = "fold",
) -> tuple[Product, ...]:
    found: set[Product] = set()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tpdet-tune-") as folder:
            config = load_model_config(write_shape(Path(folder) / "model", name))
        for place, order in product(places, orders):
            partition = make_partition(config, cast(World, place), order, None, row_layers)
            found |= {p for p in rank_products(partition) if p.kind in kinds}
    return tuple(sorted(found))
