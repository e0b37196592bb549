"""Tells an error that says "no room here" (memory, disk, processes) from a mistake of ours.

Python, its loader and torch each say it by another class, and some by their words alone.
"""

import errno
import os

from tpdet.errors import ResourceError, TpdetError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMORY_WORDS = (
    "failed to map segment",  # the loader's, of a library that does not fit
    "cannot allocate memory",
    "can't allocate memory",  # torch's
    "bad_alloc",
)
_MORE_MEMORY = "raise its limit (ulimit -v, or a container's or job's), or end what else runs here"
_MORE_DISK = "free some space there, or raise the limit (ulimit -f)"


def resource_error(error: BaseException) -> ResourceError | None:
    """The error to report in place of one that means no room; None for any other."""
    if isinstance(error, TpdetError):
        return error if isinstance(error, ResourceError) else None
    number, message = getattr(error, "errno", None), str(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _names_memory(error, message):
        what = f" ({message})" if message else ""
        return ResourceError(f"memory for this process ran out{what}: {_MORE_MEMORY}")
    if isinstance(error, RuntimeError) and "can't start new thread" in message:
        return ResourceError(f"no more threads can be started: {_MORE_MEMORY}")
    if isinstance(error, BlockingIOError) and number == errno.EAGAIN and error.filename is None:
        return ResourceError("no more processes can be started: raise the limit (ulimit -u)")
    if isinstance(error, OSError) and number in (errno.EMFILE, errno.ENFILE):
        return ResourceError("no more files can be opened: raise the limit (ulimit -n)")
    if isinstance(error, OSError) and number in FULL_DISK:
        name = error.filename2 or error.filename  # of a copy the second one is what is written
        where = f"{name} cannot be written" if name else "a file's disk is full"
        return ResourceError(f"{where} ({os.strerror(number)}): {_MORE_DISK}")
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in message:
        return ResourceError(
            "no temporary folder takes a file (is its disk full?): free some space, or set TMPDIR"
        )
    return None


def _names_memory(error: BaseException, message: str) -> bool:
    return isinstance(error, ImportError | RuntimeError | OSError) and any(
        words in message.lower() for words in _MEMORY_WORDS
    )
