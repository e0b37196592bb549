"""Finds the file of a directory that has or lists its weights. Needs no torch."""

from pathlib import Path

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.errors import CheckpointError, NotFoundError

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
