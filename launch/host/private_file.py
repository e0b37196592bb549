"""Files that hold secrets: read only if nobody else can read or replace them."""

import os
import stat

from tpdet.errors import NotFoundError, NotPermittedError, UsageError
from tpdet.launch.host.regular_file import NotRegularError, open_regular


def read_private_file(path: str, flag: str, content: str, max_bytes: int) -> bytes:
    """The bytes of a regular file that only its owner, who is us or root, may use.

    `flag` and `content` word the refusals ("--api-key-file", "one key a line"). Raises
    NotFoundError, NotPermittedError if the file is not ours or others may use it, UsageError if it
    is no file or over `max_bytes`.
    """
    try:
        with open_regular(path) as file:
            _check(os.fstat(file.fileno()), f"{flag} {path}")
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{flag} {path} does not exist: name a file with {content}") from error
    except NotRegularError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: name a file with {content}") from error
    except OSError as error:
        raise NotPermittedError(
            f"{flag} {path} cannot be read ({error.strerror}): name a file of this user's"
        ) from error
    if len(data) > max_bytes:
        raise UsageError(f"{flag} {path} is over {max_bytes} bytes: name a file with {content}")
    return data


def _check(status: os.stat_result, name: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise NotPermittedError(
            f"{name} has mode {mode:04o}, open to others: chmod 600 it (or 400)"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise NotPermittedError(
            f"{name} belongs to user {status.st_uid}, who could change it: chown it to "
            f"{os.geteuid()}"
        )
