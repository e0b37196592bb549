"""The engine that a bench times, by the settings of `LLM`."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpdet.checkpoint.model_config.known_shapes import directory_of
from tpdet.client.engine_settings import engine_config
from tpdet.config import EngineConfig


@contextmanager
def engine_of(options: argparse.Namespace) -> Iterator[EngineConfig]:
    """The engine that flags, the environment and the file of --config ask for.

    With random weights its models may be shapes by name, whose config.json is there until the end.
    Raises as `engine_config` and `directory_of`.
    """
    config = engine_config(options, os.environ)
    with tempfile.TemporaryDirectory(prefix="tpdet-shapes-") as folder:
        models = {"model": config.model, "draft_model": config.draft_model}
        yield config.model_copy(
            update={
                field: directory_of(name, config.load_format, Path(folder))
                for field, name in models.items()
                if name is not None
            }
        )
