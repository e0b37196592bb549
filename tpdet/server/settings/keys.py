"""API keys: from a file only its owner can read, kept as digests, compared in constant time.

A key also names a tenant: each has a salt of its own for what the engine shares between requests.
"""

import hashlib
import hmac
import re
import secrets

import blake3

from tpdet.errors import UsageError
from tpdet.launch.host.private_file import read_private_file

MAX_KEY_FILE_BYTES = 1 << 20
_DIGEST = re.compile(rb"sha256:([0-9a-f]{64})")


def read_key_file(path: str, flag: str = "--api-key-file") -> tuple[str, ...]:
    """SHA-256 (hex) of each key in the file: one key a line, blank and `#` lines skipped.

    A line `sha256:` with 64 hex digits holds a key's digest instead of the key. `flag` named it.

    Raises NotFoundError, NotPermittedError if it is not ours or others may use it, UsageError if
    it is no file of at most 1 MiB, holds no key, or a key that cannot stand in a header.
    """
    data = read_private_file(path, flag, "one key a line", MAX_KEY_FILE_BYTES)
    lines = [line.strip() for line in data.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise UsageError(f"{flag} {path} holds no key: write one key a line")
    for key in keys:
        if not all(33 <= byte <= 126 for byte in key):
            raise UsageError(
                f"{flag} {path} holds a key that is not printable ASCII without blanks: write one "
                "key a line"
            )
    return tuple(_digest(key) for key in keys)


def _digest(line: bytes) -> str:
    found = _DIGEST.fullmatch(line)
    return found[1].decode() if found else hashlib.sha256(line).hexdigest()


class KeyRing:
    """The keys a server accepts; without any, every client is accepted.

    `secret` (32 bytes, a fresh one by default) keys the tenants' salts, so that no salt can be
    computed from its key and none means anything to another run.
    """

    def __init__(self, digests: tuple[str, ...], secret: bytes | None = None) -> None:
        self._digests = tuple(bytes.fromhex(digest) for digest in digests)
        secret = secrets.token_bytes(32) if secret is None else secret
        self._salts = tuple(
            blake3.blake3(digest, key=secret).hexdigest() for digest in self._digests
        )

    def tenant_salt(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """The salt (64 hex digits) of the key in one of two headers; None if neither holds one.

        authorization, api_key: Authorization, and x-api-key, which counts where the other has none.
        Empty if the server has no keys: then all clients are one tenant. Every key is compared, so
        that the time reveals nothing.
        """
        if not self._digests:
            return ""
        key = sent_key(authorization, api_key)
        digest = hashlib.sha256(key).digest()
        matching = None
        for known, salt in zip(self._digests, self._salts, strict=True):
            if hmac.compare_digest(known, digest):
                matching = salt
        return matching if key else None


def bearer_key(authorization: bytes | None) -> bytes:
    """The key in an Authorization header; empty if it holds none."""
    scheme, _, key = (authorization or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def sent_key(authorization: bytes | None, api_key: bytes | None) -> bytes:
    """The key that a request came with, in either header; empty if there is none."""
    return bearer_key(authorization) or (api_key or b"").strip()
