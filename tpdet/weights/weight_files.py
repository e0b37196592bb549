"""Finds the file of a directory that has or lists its weights. Needs no torch."""

from pathlib import Path

from tpdet.errors import CheckpointError, NotFoundError
from tpdet.gguf_file.header import is_gguf

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_weights(directory: Path) -> Path:
    """`model.safetensors`, or the index of the shards; a GGUF file itself.

    Raises NotFoundError without either, CheckpointError with both.
    """
    if is_gguf(directory):
        return directory
    found = [directory / name for name in (SINGLE, INDEX) if (directory / name).exists()]
    if len(found) == 2:
        raise CheckpointError(
            f"{directory} holds both {SINGLE} and {INDEX}: remove the one that is not the model"
        )
    if not found:
        raise NotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}")
    return found[0]
