"""Lets the system read a model's files into memory while the start does something else."""

import os
from pathlib import Path
from threading import Thread

from tpdet.checkpoint.gguf.header import is_gguf

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
