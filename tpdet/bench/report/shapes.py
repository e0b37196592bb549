"""Well-known models as one of several ranks holds them."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tpdet.comm.world.world import World
from tpdet.layers.partition import Partition, make_partition
from tpdet.model_config import ModelConfig, load_model_config
from tpdet.synthetic.model_shapes import write_shape


@dataclass(frozen=True)
class _Place:
    """Rank 0 of a world that is not there: enough to cut a model."""

    size: int
    rank: int = 0
    timeout: float = 0.0


def named_config(name: str, dtype: str = "auto") -> ModelConfig:
    """The configuration of a well-known model. Raises UsageError for an unknown name."""
    with tempfile.TemporaryDirectory(prefix="tpdet-shape-") as folder:
        return load_model_config(write_shape(Path(folder) / "model", name), dtype)


def first_rank(
    config: ModelConfig, ranks: int, fold_order: str, leaves: int | None = None
) -> Partition:
    """Rank 0's cut of a model, without a world. Raises UsageError naming the sizes that fit."""
    return make_partition(config, cast(World, _Place(ranks)), fold_order, leaves)


def shards(
    names: Iterable[str], ranks: Iterable[int], fold_order: str
) -> Iterator[tuple[str, Partition]]:
    """Rank 0's cut of every named model at every size.

    Raises UsageError for an unknown name and for a size that does not fit.
    """
    for name in names:
        config = named_config(name)
        for size in ranks:
            yield name, first_rank(config, size, fold_order)


def products(partition: Partition) -> list[tuple[str, int, int]]:
    """(name, N, K) of a rank's products."""
    config, mine = partition.config, len(partition.mine)
    hidden, query = config.hidden_size, partition.query_heads * config.head_dim
    key = len(partition.key_heads) * config.head_dim
    inner = config.intermediate_size // partition.leaves * mine
    return [
        ("qkv", query + 2 * key, hidden),
        ("o", hidden, query),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", partition.vocabulary_share * mine, hidden),
    ]
