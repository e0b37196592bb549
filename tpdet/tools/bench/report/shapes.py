"""Well-known models as one of several ranks holds them."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.world.world import World
from tpdet.layers.partition import Partition, make_partition


@dataclass(frozen=True)
class _Place:
    """A rank of a world that is not there: enough to cut a model."""

    size: int
    rank: int = 0
    timeout: float = 0.0


def named_config(name: str, dtype: str = "auto") -> ModelConfig:
    """The configuration of a well-known model. Raises UsageError for an unknown name."""
    with tempfile.TemporaryDirectory(prefix="tpdet-shape-") as folder:
        return load_model_config(write_shape(Path(folder) / "model", name), dtype)


def cut_for(
    config: ModelConfig,
    ranks: int,
    fold_order: str,
    leaves: int | None = None,
    *,
    rank: int = 0,
    row_layers: str = "fold",
    experts: str = "auto",
) -> Partition:
    """One rank's cut of a model, without a world. Raises UsageError naming the sizes that fit."""
    place = cast(World, _Place(ranks, rank))
    return make_partition(config, place, fold_order, leaves, row_layers, experts)


def shards(
    names: Iterable[str], ranks: Iterable[int], fold_order: str
) -> Iterator[tuple[str, Partition]]:
    """Rank 0's cut of every named model at every size.

    Raises UsageError for an unknown name and for a size that does not fit.
    """
    for name in names:
        config = named_config(name)
        for size in ranks:
            yield name, cut_for(config, size, fold_order)
