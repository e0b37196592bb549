"""Opens regular files only: opening a named pipe by mistake would wait for ever.

A pointer of git-lfs, a few lines in the place of the file, is none either.
"""

import contextlib
import errno
import os
import stat
from typing import BinaryIO


class NotRegularError(OSError):
    """No file where one is wanted: a pipe, device, directory, pointer; `strerror` says which."""


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a clone without git-lfs holds in the place of each large file begins so."""


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise NotRegularError for what is there and is no file, so that no file takes its place."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise _irregular(_kind_of(mode), path)


def _kind_of(mode: int) -> str:
    return next((text for is_of_kind, text in _KINDS if is_of_kind(mode)), "no regular file")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, open for reading; never waits. Raises NotRegularError, else OSError as `open`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # what a socket's path gives
            raise
        raise _irregular("a socket", path) from None
    mode = os.fstat(descriptor).st_mode
    kind = _kind_of(mode)
    if stat.S_ISREG(mode):
        if os.pread(descriptor, len(_POINTER), 0) != _POINTER:
            return os.fdopen(descriptor, "rb")
        kind = "a git-lfs pointer (git lfs pull fetches the file)"
    os.close(descriptor)
    raise _irregular(kind, path)


def _irregular(kind: str, path: str | os.PathLike[str]) -> NotRegularError:
    return NotRegularError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
