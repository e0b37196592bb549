"""Shared fixtures: tiny checkpoints, made once a test run."""

import pytest

from tpdet.make_model import make_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A function that makes (once) and returns the directory of a tiny model."""
    made = {}
    root = tmp_path_factory.mktemp("models")

    def make(like="qwen3", **options):
        key = repr((like, sorted(options.items(), key=str)))
        if key not in made:
            settings = {"hidden": 256, "layers": 2, "intermediate": 384, "vocab": 1100} | options
            made[key] = make_model(root / f"{like}-{len(made)}", like=like, **settings)
        return made[key]

    return make
