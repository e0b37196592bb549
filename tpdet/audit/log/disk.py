"""The file operations that a log stands on: each may fail, and what is not synced may be lost.

A file's bytes are durable after `sync`; that it is there, under its name, after `sync_folder`.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tpdet.errors import AuditError, NotPermittedError

MOST_FILE_BYTES = 1 << 27


class Disk:
    """The operating system's files. All raise OSError."""

    def read(self, path: Path) -> bytes:
        """A file's bytes. Raises NotPermittedError; AuditError for a pipe, a link, a huge file."""
        descriptor = _open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def read_durable(self, path: Path) -> bytes:
        """A file's bytes, made durable first: no power loss takes back what a reader has seen."""
        descriptor = _open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
            try:
                os.fsync(descriptor)
            except OSError:
                if os.access(path, os.W_OK):  # else the file system is read-only: nothing is lost
                    raise
            return data

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, sorted; nothing where there is none."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def has_folder(self, path: Path) -> bool:
        """Whether a folder is there."""
        return path.is_dir()

    def lock(self, path: Path) -> int:
        """A file's lock until the descriptor closes. Raises BlockingIOError if another has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, path: Path) -> int:
        """A descriptor of an empty file that is written from its beginning."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, descriptor: int, data: bytes) -> int:
        """Write at the end; the number of bytes that were, which may be fewer."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Make a file's bytes durable."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what bears it."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> bool:
        """Make one folder; False where it is there already."""
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            return False
        return True

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Make durable which names a folder has."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_regular(path: Path) -> int:
    """A descriptor to read a file from."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AuditError(f"{path} is a link, which no log holds: take it away") from None
        if error.errno == errno.EACCES:
            raise NotPermittedError(f"{path} may not be read: be its owner, or chmod it") from None
        raise
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size <= MOST_FILE_BYTES:
        return descriptor
    os.close(descriptor)
    raise AuditError(
        f"{path} is no file of at most {MOST_FILE_BYTES >> 20} MiB, as a log's are: take it away"
    )


def write_whole(disk: Disk, descriptor: int, data: bytes) -> None:
    """Write all bytes at the end of a file, and make them durable."""
    written = 0
    while written < len(data):
        written += disk.write(descriptor, data[written:])
    disk.sync(descriptor)


class DurableFolder:
    """A folder that is there, in which files and folders are made durably."""

    def __init__(self, disk: Disk, top: Path) -> None:
        self._disk, self._top = disk, top
        self._durable: set[Path] = set()

    def make(self, path: Path) -> None:
        """Make a folder and those between it and the top.

        A process that was killed may have made them and not synced them, so each is synced once.
        """
        if path != self._top and path not in self._durable:
            self.make(path.parent)
            made = self._disk.make_folder(path)
            try:
                self._disk.sync_folder(path.parent)
            except PermissionError:  # not ours to read, and there before us
                if made:
                    raise
            self._durable.add(path)

    def write(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Write whole files, {path below the top: bytes}: each is there whole, or as it was."""
        folders: dict[Path, None] = {}
        for name, data in files:
            path = self._top / name
            self.make(path.parent)
            draft = path.with_name(path.name + ".new")
            descriptor = self._disk.create(draft)
            try:
                write_whole(self._disk, descriptor, data)
            finally:
                self._disk.close(descriptor)
            self._disk.rename(draft, path)
            folders[path.parent] = None
        for folder in folders:
            self._disk.sync_folder(folder)

    def remove(self, name: str) -> None:
        """Remove a folder of files; its absence is not made durable."""
        folder = self._top / name
        names = self._disk.names(folder)
        for file in names:
            self._disk.remove(folder / file)
        if names:
            self._disk.remove_folder(folder)
