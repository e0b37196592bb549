"""Which file of a directory has or lists its weights, and what lies beside. Needs no torch."""

import os
import shutil
from pathlib import Path
from threading import Thread

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.errors import CheckpointError, NotFoundError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BESIDE_WEIGHTS = (".json", ".jinja", ".txt", ".model")


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
        raise NotFoundError(
            f"{directory} holds neither {SINGLE} nor {INDEX}: give a whole Hugging Face directory"
        )
    return found[0]


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy the configuration, the tokenizer and what else a model's directory has in text."""
    for file in sorted(source.iterdir()):
        if file.suffix in _BESIDE_WEIGHTS and ".safetensors" not in file.name:
            shutil.copyfile(file, target / file.name)


_CHUNK = 4 << 20
"""Bytes that are asked for at a time: of more, Linux reads no more than a device's read-ahead."""


def read_ahead(directory: Path) -> Thread:
    """Begin to read the weights of a model directory, or a GGUF file; returns at once.

    The thread ends by itself. It only hints: a file that cannot be read is left to whoever loads
    it, with an error of its own.
    """
    files = [directory] if is_gguf(directory) else sorted(directory.glob("*.safetensors"))
    thread = Thread(target=_hint, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _hint(files: list[Path]) -> None:
    for path in files:
        try:
            with path.open("rb") as file:
                for begin in range(0, os.fstat(file.fileno()).st_size, _CHUNK):
                    os.posix_fadvise(file.fileno(), begin, _CHUNK, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
