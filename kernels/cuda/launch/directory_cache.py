"""Triton's cache behind a directory of compiled kernels: read there first, written elsewhere.

read_first(directory)      # for the rest of the process
"""

from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


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
