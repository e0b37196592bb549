"""The standard streams of a command: closed, without a reader, or in a locale without letters."""

import codecs
import errno
import io
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from tpdet.errors import ResourceError, TpdetError, UsageError
from tpdet.launch.host.resources import FULL_DISK, resource_error

READER_LEFT = 128 + signal.SIGPIPE
"""The exit code of a command whose reader left before the end, as shells give it."""
_NO_ROOM = (*FULL_DISK, errno.EIO)


def run_command(command: Callable[[], int]) -> int:
    """Run a command and write out what it printed; its exit code, or that of its error.

    An error is one line on standard error, Ctrl-C is 130, and READER_LEFT says that whoever read
    standard output or standard error left before the end. Raises what is no deliberate error.
    """
    _prepare()
    try:
        try:
            return command()
        except TpdetError as error:
            _say(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            if (shortage := resource_error(error)) is None or _of_a_stream(error):
                raise
            _say(str(shortage))
            return shortage.exit_code
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except BrokenPipeError:
        if not _discard_unread():
            raise
        return READER_LEFT
    except OSError as error:
        if not _of_a_stream(error):
            raise
        _to_nowhere(sys.stdout)
        _say(f"standard output cannot be written: {error.strerror}")
        return ResourceError.exit_code


def _say(message: str) -> None:
    """Say on standard error how a command ended, if it takes a line."""
    try:
        print(f"tpdet: {message}", file=sys.stderr, flush=True)
    except OSError as error:
        if not _of_a_stream(error):
            raise
        _to_nowhere(sys.stderr)


def _of_a_stream(error: Exception) -> bool:
    """Whether no room is left for a standard stream.

    A file that a command opens has a name only where its opening fails, not where it is written.
    """
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM or error.filename is not None:
        return False
    return error.errno == errno.EIO or any(map(_may_be_full, (1, 2)))


def _may_be_full(descriptor: int) -> bool:
    """Whether it is a file, or a device such as /dev/full; pipes and terminals wait for room."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode):
        is_null = os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
        return not is_null and not os.isatty(descriptor)
    return stat.S_ISREG(mode)


def print_utf8(lines: Iterable[str | bytes]) -> None:
    """Print lines as UTF-8 whatever the locale: JSON that a program reads."""
    sys.stdout.flush()
    for line in lines:
        data = line.encode() if isinstance(line, str) else line
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.flush()


def error_is_terminal() -> bool:
    """Whether standard error is a terminal; it may be closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def argument_text(argument: str) -> str:
    """A typed text that is no path. Raises UsageError for bytes that are no UTF-8."""
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UsageError(f"the text {argument[:80]!r} is no UTF-8: give it as UTF-8") from None


def _prepare() -> None:
    """Open what is closed, and let streams take text that their encoding lacks.

    A descriptor of the three that is closed would be given to the next file that is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # A locale without characters (C) says nothing of what a pipe holds.
    source = sys.stdin
    if isinstance(source, io.TextIOWrapper) and codecs.lookup(source.encoding).name == "ascii":
        source.reconfigure(encoding="utf-8")


def _discard_unread() -> bool:
    """Point streams whose reader has left nowhere, as exiting flushes again; whether any was."""
    left = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (OSError, ValueError):
            continue
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            _to_nowhere(stream)
            left = True
    return left


def _to_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
