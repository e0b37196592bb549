"""The run secret: 32 random bytes that the ranks of one run share and nobody else knows.

On one host the owner of the run directory makes it (`RUN_DIR/secret`, mode 0600) and the other
ranks read it there. Over several hosts the operator hands the same one to every rank: a file named
by `--run-secret-file`, or the environment variable TPDET_RUN_SECRET. Text form: 64 hex digits. It
stands in no argument, log, metric or message.
"""

import os
import re
import secrets
from collections.abc import MutableMapping

from tpdet.errors import UsageError
from tpdet.launch.host.private_file import read_private_file

SECRET_VARIABLE = "TPDET_RUN_SECRET"
SECRET_BYTES = 32
_CONTENT = "64 hex digits (openssl rand -hex 32)"
_MAX_FILE_BYTES = 256


def new_secret() -> bytes:
    """32 fresh random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def given_secret(
    path: str | None = None, environ: MutableMapping[str, str] | None = None
) -> bytes | None:
    """The secret the operator handed in: from the file at `path`, else from TPDET_RUN_SECRET.

    None if there is neither. The variable is taken out of `environ`, so that no child inherits it.
    Raises UsageError for both at once and for what is not 64 hex digits, and what
    `read_private_file` raises.
    """
    environ = os.environ if environ is None else environ
    text = environ.pop(SECRET_VARIABLE, None)
    if path is None:
        return None if text is None else _parse(text, SECRET_VARIABLE)
    if text is not None:
        raise UsageError(f"both --run-secret-file and {SECRET_VARIABLE} are set: use one")
    return read_secret_file(path)


def read_secret_file(path: str, flag: str = "--run-secret-file") -> bytes:
    """The secret in a private file. Raises as `given_secret`."""
    data = read_private_file(path, flag, _CONTENT, _MAX_FILE_BYTES)
    return _parse(data.decode("ascii", "replace"), flag)


def _parse(text: str, source: str) -> bytes:
    text = text.strip()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise UsageError(f"{source} does not hold {_CONTENT}")  # never its value
    return bytes.fromhex(text)
