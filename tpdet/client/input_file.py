"""Reads a file that a command is given: a regular one, or standard input for `-`; never for ever.

A pipe may have no writer and a device no end, so neither is opened by its name.
"""

import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from tpdet.errors import CheckpointError, NotFoundError, NotPermittedError, UsageError
from tpdet.launch.host.regular_file import NotRegularError, open_regular
from tpdet.launch.ranks.environment import read_environment

STDIN = "-"
MAX_BYTES = 1 << 30
"""The default limit of what is read."""

_BOM = b"\xef\xbb\xbf"


def read_input(path: str, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """All bytes of a file, or of standard input for `-`.

    remedy: the end of a message, what file to give. Raises NotFoundError if there is none,
    NotPermittedError if it may not be read, CheckpointError if it is no regular file or longer than
    `max_bytes`.
    """
    name = "standard input" if path == STDIN else path
    try:
        if path == STDIN:
            return _bounded(sys.stdin.buffer, name, max_bytes)
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                raise _too_long(name, max_bytes)
            return _bounded(file, name, max_bytes)
    except NotRegularError as error:
        through = f", or send it: tpdet ... - < {path}" if "pipe" in str(error) else ""
        raise CheckpointError(f"{path}: {error.strerror}: {remedy}{through}") from None
    except CheckpointError:
        raise
    except PermissionError as error:
        raise NotPermittedError(f"{name} cannot be read ({error.strerror}): {remedy}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{name} does not exist: {remedy}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name!r} cannot be read ({why}): {remedy}") from None


def read_by_each_rank(path: str, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """What `read_input` reads, for a command that every rank of a launcher runs.

    Raises UsageError for standard input, which one of several ranks gets; else as `read_input`.
    """
    ranks = read_environment().size
    if path == STDIN and ranks > 1:
        raise UsageError(f"- reaches one process only, not all {ranks} ranks: give a file")
    return read_input(path, remedy, max_bytes)


def text_of(data: bytes, name: str, remedy: str) -> str:
    """UTF-8 text, without the mark that some editors put before it. Raises CheckpointError."""
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is no UTF-8 (byte {error.start}): {remedy}") from None


def numbered_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line that is not blank, with its number from 1; its end may be that of Windows."""
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), 1):
        if line.strip():
            yield number, line


def _bounded(file: BinaryIO, name: str, max_bytes: int) -> bytes:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _too_long(name, max_bytes)
    return data


def _too_long(name: str, max_bytes: int) -> CheckpointError:
    return CheckpointError(f"{name} is over the limit of {max_bytes} bytes: split it")
