"""Configurations of well-known models, for random weights (`--load-format dummy`).

Only `config.json` is written: no weights and no tokenizer, so prompts are token ids
(`--skip-tokenizer-init`). The numbers are those of the published checkpoints.
"""

import json
import os
from pathlib import Path
from typing import Any

from tpdet.checkpoint.model_config import load_model_config
from tpdet.errors import NotFoundError, UsageError


def _shapes(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The configurations of the table, each by the one that it is `like` and what it has besides.

    Kinds of layers (`layer_types`) are given once and recur over the layers.
    """
    known = tables["bases"] | tables["shapes"]

    def whole(name: str) -> dict[str, Any]:
        own = dict(known[name])
        return (whole(own.pop("like")) | own) if "like" in own else own

    shapes = {name: whole(name) for name in tables["shapes"]}
    for shape in shapes.values():
        if kinds := shape.get("layer_types"):
            layers = range(shape["num_hidden_layers"])
            shape["layer_types"] = [kinds[layer % len(kinds)] for layer in layers]
    return shapes


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SHAPES = _shapes(_TABLES)
PUBLISHED: dict[str, str] = _TABLES["published"]
"""Hub names of checkpoints that have a shape."""


def write_shape(directory: Path | str, name: str) -> Path:
    """Write the `config.json` of a shape. Raises UsageError for unknown names and used folders."""
    directory = Path(directory)
    if name not in SHAPES:
        raise UsageError(f"model shape {name!r}: use one of {', '.join(SHAPES)}")
    if directory.exists() and any(os.scandir(directory)):
        raise UsageError(f"{directory} is not empty: choose another directory or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    load_model_config(directory)
    return directory


def is_shape(model: str) -> bool:
    """Whether a model is named that has no directory, but a shape."""
    return model in SHAPES and not Path(model).exists()


def directory_of(model: str, load_format: str, folder: Path) -> str:
    """A model as it was named; for random weights also a shape, whose config goes to `folder`.

    Raises NotFoundError for a shape whose weights would have to be read.
    """
    if not is_shape(model):
        return model
    if load_format != "dummy":
        raise NotFoundError(f"model {model!r} is a shape without weights: add --load-format dummy")
    written = folder / model
    return str(written if written.exists() else write_shape(written, model))
