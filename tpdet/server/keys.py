"""API keys: from a file only its owner can read, kept as digests, compared in constant time.

A key also names a tenant: each has a salt of its own for what the engine shares between requests.
"""

import hashlib
import hmac
import os
import secrets
import stat

import blake3

from tpdet.errors import NotFoundError, NotPermittedError, UsageError

MAX_KEY_FILE_BYTES = 1 << 20


def read_key_file(path: str) -> tuple[str, ...]:
    """SHA-256 (hex) of each key in the file: one key a line, blank and `#` lines skipped.

    Raises NotFoundError, NotPermittedError if it is not ours or others may use it, UsageError if
    it is no file of at most 1 MiB, holds no key, or a key that cannot stand in a header.
    """
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check_file(os.fstat(descriptor))
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(f"--api-key-file {path} does not exist") from error
    except (PermissionError, IsADirectoryError) as error:
        raise NotPermittedError(
            f"--api-key-file {path} cannot be read: {error.strerror}"
        ) from error
    if len(data) > MAX_KEY_FILE_BYTES:
        raise UsageError(f"--api-key-file is over {MAX_KEY_FILE_BYTES} bytes: keep fewer keys")
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


def _check_file(status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("--api-key-file is not a file: name a file with one key a line")
    if mode & 0o077:
        raise NotPermittedError(
            f"--api-key-file has mode {mode:04o}, open to others: chmod 600 it (or 400)"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise NotPermittedError(
            f"--api-key-file belongs to user {status.st_uid}, who could change it: chown it to "
            f"{os.geteuid()}"
        )


class KeyRing:
    """The keys a server accepts; none means that everything is open.

    `secret` (32 bytes, a fresh one by default) keys the tenants' salts, so that no salt can be
    computed from its key and none means anything to another run.
    """

    def __init__(self, digests: tuple[str, ...], secret: bytes | None = None) -> None:
        self._digests = tuple(bytes.fromhex(digest) for digest in digests)
        secret = secrets.token_bytes(32) if secret is None else secret
        self._salts = tuple(
            blake3.blake3(digest, key=secret).hexdigest() for digest in self._digests
        )

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether an Authorization header holds one of the keys."""
        return self.tenant_salt(authorization) is not None

    def tenant_salt(self, authorization: bytes | None) -> str | None:
        """The salt (64 hex digits) of the key in an Authorization header; None if it holds none.

        Empty where no keys are asked for: then all clients are one tenant. Every key is compared,
        whatever the outcome, so that the time taken tells nothing.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, salt in zip(self._digests, self._salts, strict=True):
            if hmac.compare_digest(known, digest):
                found = salt
        return found if scheme.lower() == b"bearer" else None
