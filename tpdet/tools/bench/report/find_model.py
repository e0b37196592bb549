"""Find a model of a command by name: only its config.json is needed, no weights."""

from pathlib import Path

from tpdet.arguments.suggestions import did_you_mean
from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.known_shapes import PUBLISHED, SHAPES
from tpdet.checkpoint.resolve import resolve_model
from tpdet.errors import NotFoundError
from tpdet.tools.bench.report.shapes import named_config


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
