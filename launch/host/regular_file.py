"""Opens regular files only: opening a named pipe by mistake would wait for ever."""

import errno
import os
import stat
from typing import BinaryIO


class NotRegularError(OSError):
    """A pipe, socket, device or directory where a file is wanted; `strerror` says which."""


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, open for reading; never waits. Raises NotRegularError, else OSError as `open`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # what a socket's path gives
            raise
        raise _irregular("a socket", path) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise _irregular(next((text for of, text in _KINDS if of(mode)), "no regular file"), path)


def _irregular(kind: str, path: str | os.PathLike[str]) -> NotRegularError:
    return NotRegularError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
