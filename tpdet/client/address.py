"""Where a server listens, as a flag names it, and what its errors say."""

import http.client
import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from tpdet.errors import UsageError


@dataclass(frozen=True)
class Address:
    """A server's host and port; `prefix` is the path before `/v1`.

    flag: the one that named it; key_flag: the one that gives its API key.
    """

    host: str
    port: int
    secure: bool
    prefix: str
    flag: str = "--base-url"
    key_flag: str = "--api-key-file"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(
        cls, url: str, flag: str = "--base-url", key_flag: str = "--api-key-file", scheme: str = ""
    ) -> "Address":
        """A URL, with or without /v1, as an address; scheme: of one without. Raises UsageError."""
        parts = urlsplit(url if "://" in url else scheme + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{flag} {url!r}: use http://HOST:PORT")
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{flag} {url!r}: {error}") from error
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, prefix, flag, key_flag)

    @property
    def context(self) -> ssl.SSLContext | None:
        """How its certificate is checked; None without TLS."""
        return ssl.create_default_context() if self.secure else None

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that opens with its first request; `timeout` seconds bound each read."""
        context = self.context
        if context is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)


def message_of(content: object) -> str:
    """The message of an error of the API."""
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)


def said(content: bytes) -> str:
    """What the body of an error says, in at most 200 characters."""
    try:
        return message_of(json.loads(content))[:200]
    except ValueError:
        return content[:200].decode("utf-8", "replace")
