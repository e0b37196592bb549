"""Models by name, of which only config.json is needed, and a rank's cut of them."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tpdet.arguments.suggestions import did_you_mean
from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.known_shapes import PUBLISHED, SHAPES, write_shape
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.errors import NotFoundError
from tpdet.layers.partition import Partition, make_partition


def named_config(name: str, dtype: str = "auto") -> ModelConfig:
    """The configuration of a well-known model. Raises UsageError for an unknown name."""
    with tempfile.TemporaryDirectory(prefix="tpdet-shape-") as folder:
        return load_model_config(write_shape(Path(folder) / "model", name), dtype)


def find_model(name: str, dtype: str = "auto") -> ModelConfig:
    """The configuration of a directory, GGUF file, well-known shape (or hub name), or cached model.

    Nothing is downloaded. Raises NotFoundError when there is none, and as `load_model_config`.
    """
    if Path(name).exists():
        return load_model_config(resolve_model(name), dtype)
    shape = PUBLISHED.get(name, name)
    if shape in SHAPES:
        return named_config(shape, dtype)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        path = None
    if not isinstance(path, str):
        raise NotFoundError(
            f"model {name!r} is no directory, not in the hub's cache and none of "
            f"{', '.join([*SHAPES, *PUBLISHED])}"
            f"{did_you_mean(name, [*SHAPES, *PUBLISHED]) or ': give one of these'}"
        )
    return load_model_config(Path(path).parent, dtype)


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
    world = RehearsalWorld(rank, ranks)
    return make_partition(config, world, fold_order, leaves, row_layers, experts)


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
