"""Doors: what each listener lets in, by its keys, and on the admin listener by its origin.

The admin listener asks for no key where only this machine reaches it. What a browser was made to
send must not pass it: a page of another origin says so (`Origin`, `Sec-Fetch-Site`), and a name
that was bound to 127.0.0.1 stands in `Host`.
"""

import ipaddress
import socket
from collections.abc import Mapping

import blake3
from starlette.types import Scope

from tpdet.requests.body.problems import ApiError
from tpdet.server.about.operations import CONTROL_OPERATIONS
from tpdet.server.settings.addresses import is_loopback
from tpdet.server.settings.keys import KeyRing, sent_key

PUBLIC_PATHS = ("/health", "/health_generate", "/ready", "/metrics", "/version")
API_KEY = b"x-api-key"
"""The header in which clients of Anthropic's API send their key."""
TENANT = b"tpdet-tenant"
"""The header in which one HTTP process tells another the tenant's salt."""
_OF_BROWSERS = (b"origin", b"sec-fetch-site")


class Door:
    """The public port's: data routes, by the API keys, and control routes, where they have keys.

    logs: whether the requests that come through it have lines in the log.
    """

    logs = True

    def __init__(self, keys: KeyRing, control_keys: KeyRing | None = None) -> None:
        """control_keys: None where the control routes are closed."""
        self._keys, self._control_keys = keys, control_keys

    @property
    def has_control(self) -> bool:
        """Whether the control routes are open here."""
        return self._control_keys is not None

    def admit(self, scope: Scope) -> str:
        """The tenant's salt. Raises ApiError for what may not pass."""
        path, authorization = scope["path"], header(scope, b"authorization")
        if self._control_keys is not None and path in CONTROL_OPERATIONS:
            if self._control_keys.tenant_salt(authorization) is None:
                raise _no_key("admin key", " (--admin-key-file)")
            return ""
        salt = self._keys.tenant_salt(authorization, header(scope, API_KEY))
        if salt is None and path not in PUBLIC_PATHS:
            raise _no_key("API key", "", " or x-api-key: KEY")
        return salt or ""

    @property
    def closed(self) -> str:
        """Why a control route is not to be had here, and what opens it."""
        return (
            "control routes are closed here: --admin-key-file FILE opens them to its keys, "
            "--admin-listen HOST:PORT on a listener of their own"
        )


class InnerDoor(Door):
    """The door to the first HTTP process for requests that others let in and have in their logs."""

    logs = False

    def __init__(self) -> None:
        super().__init__(KeyRing(()))

    def admit(self, scope: Scope) -> str:
        """As `Door.admit`; never raises."""
        return (header(scope, TENANT) or b"").decode()


class AdminDoor(Door):
    """The admin listener's: everything, for clients of this machine; no page of a browser's.

    host: the address that it listens on, as the operator wrote it. keys: none, or the admin keys.
    """

    def __init__(self, keys: KeyRing, host: str) -> None:
        super().__init__(keys, keys)
        self._loopback = is_loopback(host)
        self._names = {host.lower(), "localhost"}
        if not self._loopback:
            self._names.add(socket.gethostname().lower())

    def admit(self, scope: Scope) -> str:
        """As `Door.admit`, behind the checks of where a request comes from."""
        for name in _OF_BROWSERS:
            if header(scope, name) is not None:
                raise _foreign(f"a request with {name.decode()} comes from a browser")
        host = (header(scope, b"host") or b"").decode("latin-1")
        if not self._is_own(_without_port(host)):
            raise _foreign(f"Host {host[:80]!r} is no name of this listener")
        return super().admit(scope)

    def _is_own(self, host: str) -> bool:
        """Whether a Host names this listener; an address cannot be bound to another machine."""
        if host.lower() in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback


def header(scope: Mapping[str, object], name: bytes) -> bytes | None:
    """The value of a request's header, of the first with this name in lower case."""
    for key, value in scope["headers"]:  # type: ignore[attr-defined]
        if key == name:
            return bytes(value)
    return None


def _without_port(host: str) -> str:
    """A Host's name or address: "[::1]:80" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _no_key(what: str, flag: str, other: str = "") -> ApiError:
    return ApiError(
        401,
        f"the {what} is missing or not one of this server's{flag}: send the header "
        f"Authorization: Bearer KEY{other}",
        kind="authentication_error",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )


def _foreign(why: str) -> ApiError:
    return ApiError(
        403, f"{why}: the admin listener serves programs of this machine", code="foreign_origin"
    )


_DOMAIN = b"tpdet-owner-1\n"


def owner_of(scope: Scope) -> str:
    """The owner of what a request makes: BLAKE3 (64 hex digits) of the API key it came with.

    Empty where its listener has no keys: whatever key a client sends, all are one owner. Unlike
    the tenant's salt it outlives the run, so it may be written down. What is kept of one owner
    does not exist for another.
    """
    if not scope["tpdet"].tenant_salt:
        return ""
    key = sent_key(header(scope, b"authorization"), header(scope, API_KEY))
    return blake3.blake3(_DOMAIN + key).hexdigest()
