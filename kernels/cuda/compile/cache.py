"""Triton's cache on disk: looked into without compiling, and read from a directory of kernels.

with looking_up():                          # once at a time
    key = missing_key(specialization)       # on any thread
read_first(directory)                       # for the rest of the process
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from tpdet.kernels.cuda.compile.recording import Specialization

_this_thread = threading.local()


class NotCompiledError(Exception):
    """A kernel is not on disk; `key` names its folder there."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@contextmanager
def looking_up() -> Iterator[None]:
    """Let `missing_key` look into the cache that is used; other threads compile meanwhile."""
    before: Any = knobs.cache.manager_class
    base: Any = before or FileCacheManager

    class Lookup(base):
        """The same cache, but that a thread which only looks compiles nothing."""

        def __init__(self, key: str, *more: Any, **others: Any) -> None:
            super().__init__(key, *more, **others)
            self._key = key

        def get_group(self, filename: str) -> dict[str, str] | None:
            group: dict[str, str] | None = super().get_group(filename)
            if getattr(_this_thread, "looks", False) and filename not in (group or {}):
                raise NotCompiledError(self._key)
            return group

    knobs.cache.manager_class = Lookup
    try:
        yield
    finally:
        knobs.cache.manager_class = before


def missing_key(each: Specialization) -> str | None:
    """The key of a kernel that is not on disk; None for one that is: it is kept as by `compile`.

    Raises what loading it raises.
    """
    _this_thread.looks = True
    try:
        each.compile()
    except NotCompiledError as missing:
        return missing.key
    finally:
        _this_thread.looks = False
    return None


class DirectoryCache(FileCacheManager):
    """Triton's own cache manager, but for kernels that the directory has."""

    directory = Path()
    found = 0
    """Kernels that were taken from the directory."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name; None where it is to be compiled."""
        folder = self.directory / self.key
        if not (folder / filename).is_file():
            group: dict[str, str] | None = super().get_group(filename)
            return group
        DirectoryCache.found += 1
        return {file.name: str(file) for file in folder.iterdir()}


def read_first(directory: Path) -> None:
    """Let Triton take from `directory`, which was checked, what it would compile."""
    DirectoryCache.directory = directory.resolve()
    knobs.cache.manager_class = DirectoryCache
