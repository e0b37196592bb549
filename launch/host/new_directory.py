"""A directory that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpdet.errors import UsageError


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory beside it to write in, which has its name once all is written; else it is gone.

    Raises UsageError for a file, a directory that is not empty, and where none can be made.
    """
    if directory.is_dir() and any(os.scandir(directory)):
        raise UsageError(f"{directory} is not empty: choose another directory or remove it")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: choose another directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be made ({error.strerror}): choose another directory"
        ) from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
