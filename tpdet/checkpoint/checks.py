"""What settings ask of a checkpoint, checked by its small files before any process starts."""

from pathlib import Path

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.fit import ModelLeaves, check_modes, check_ranks, place_experts
from tpdet.checkpoint.model_config.pooling import load_for_task
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.weight_files import find_weights
from tpdet.config import EngineConfig
from tpdet.errors import UsageError


def check_checkpoint(config: EngineConfig, ranks: int) -> tuple[ModelConfig, ModelLeaves]:
    """The model's configuration, and its leaves over `ranks` ranks.

    A hub name is downloaded here. Raises NotFoundError, CheckpointError and UsageError as a rank
    would, seconds later.
    """
    directory = resolve_model(config.model, config.revision)
    model, _ = load_for_task(directory, config.dtype, config.task)
    leaves = check_ranks(model, ranks, config.leaves)
    place_experts(model, ranks, config.experts)
    check_modes(model, config.row_layers, config.may_be_approximate)
    check_packed(config, directory)
    if config.load_format != "dummy":
        find_weights(directory)
    return model, leaves


def check_packed(config: EngineConfig, directory: Path) -> None:
    """Refuse (UsageError) packed weights of a model that has none."""
    if config.weights != "packed":
        return
    if directory.is_file() or read_stored_form(directory).quantisation is None:
        raise UsageError(
            f"weights packed: {config.model} has no quantised weights in safetensors: use weights "
            "auto"
        )
