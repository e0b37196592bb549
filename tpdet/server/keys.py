"""API keys: from a file only its owner can read, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
import stat

from tpdet.errors import NotFoundError, NotPermittedError, UsageError

MAX_KEY_FILE_BYTES = 1 << 20


def read_key_file(path: str) -> tuple[str, ...]:
    """SHA-256 (hex) of each key in the file: one key a line, blank and `#` lines skipped.

    Raises NotFoundError, NotPermittedError if others than the owner can read it, UsageError if it
    holds no key or a key that cannot stand in a header.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise NotPermittedError(
                    f"--api-key-file has mode {mode:04o}, readable by others: chmod 600 it"
                )
            data = file.read(MAX_KEY_FILE_BYTES)
    except FileNotFoundError as error:
        raise NotFoundError(f"--api-key-file {path} does not exist") from error
    except (PermissionError, IsADirectoryError) as error:
        raise NotPermittedError(
            f"--api-key-file {path} cannot be read: {error.strerror}"
        ) from error
    lines = [line.strip() for line in data.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise UsageError("--api-key-file holds no key: one key a line")
    for key in keys:
        if not all(33 <= byte <= 126 for byte in key):
            raise UsageError(
                "--api-key-file holds a key that is not printable ASCII without blanks"
            )
    return tuple(hashlib.sha256(key).hexdigest() for key in keys)


class KeyRing:
    """The keys a server accepts; none means that everything is open."""

    def __init__(self, digests: tuple[str, ...]) -> None:
        self._digests = tuple(bytes.fromhex(digest) for digest in digests)

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether an Authorization header holds one of the keys.

        Every key is compared, whatever the outcome, so that the time taken tells nothing.
        """
        if not self._digests:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == b"bearer"
