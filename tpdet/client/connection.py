"""HTTP to a running OpenAI-compatible server: a JSON answer, or a stream of events."""

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpdet.client.address import Address, message_of
from tpdet.errors import (
    NotFoundError,
    NotPermittedError,
    PeerLostError,
    RequestError,
    ResourceError,
    TpdetError,
    UsageError,
)
from tpdet.launch.host.private_file import read_private_file
from tpdet.server.settings.sources import read_key

_MAX_KEY_FILE_BYTES = 1 << 20
_BUSY = (429, 503)
_LOST = ("engine_dead", "draining")  # codes of answers that another server may finish
RESUME_SECONDS = 10.0
PAUSE_SECONDS = 0.5
TRIES = 10  # of a request that a busy server is asked again


class HttpError(TpdetError):
    """The server answers with an error: its status, JSON body and name of the request, if any."""

    def __init__(self, message: str, status: int, body: Any = None, request_id: str = "") -> None:
        super().__init__(message)
        self.status, self.body, self.request_id = status, body, request_id or None


class RefusedError(HttpError, RequestError):
    """The server refuses the request (400 to 499)."""


class BusyError(HttpError, ResourceError):
    """The server takes no request now; `seconds` is when to ask again."""

    seconds = 1.0


class _StreamPosition:
    """Where a stream is: behind the event of `cursor`, if one has come."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self._first: TpdetError | None = None  # since the last event
        self._until = 0.0  # monotonic seconds

    def moved(self, cursor: str | None) -> None:
        """An event has come."""
        self.cursor, self._first = cursor, None

    def lost(self, error: TpdetError) -> None:
        """The server is lost, or is none. Raises the first such error RESUME_SECONDS after it."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._until = error, now + RESUME_SECONDS
        elif now > self._until:
            raise self._first from None


class Connection:
    """One server. Each request opens a new connection; `timeout` seconds bound each read.

    Every method raises NotFoundError if no server answers, NotPermittedError if it wants another
    key, BusyError if it takes none now, RefusedError for what it refuses, PeerLostError if it is
    lost in the middle, and HttpError for any other failure of its own.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        self.address = Address.parse(url, "--url", scheme="http://")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self.url = f"{parts.scheme}://{parts.netloc}{self.address.prefix}"
        self._key = key
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with self._answer("GET", path, None) as answer:
            return _json(_received(answer.read))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a body."""
        with self._answer("POST", path, body) as answer:
            return _json(_received(answer.read))

    def post_patiently(self, path: str, body: Mapping[str, Any]) -> Any:
        """What `post` gives; a busy server is asked again when it says, TRIES times in all."""
        for _ in range(TRIES - 1):
            try:
                return self.post(path, body)
            except BusyError as error:
                time.sleep(error.seconds)
        return self.post(path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events that answer a body, until the last; closing the iterator stops the answer.

        Where a server is lost in the middle, the answer goes on behind the last event if one takes
        the request again within RESUME_SECONDS, be it another one at the same address.
        """
        position = _StreamPosition()
        while True:
            try:
                yield from self._events(path, {**body, "stream": True}, position)
                return
            except (PeerLostError, NotFoundError, BusyError) as error:
                if position.cursor is None:
                    raise
                position.lost(error)
            time.sleep(PAUSE_SECONDS)

    def _events(
        self, path: str, body: Mapping[str, Any], position: _StreamPosition
    ) -> Iterator[dict[str, Any]]:
        """The events behind a position, which moves with them."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": position.cursor or ""}
        with self._answer("POST", path, body, headers) as answer:
            cursor = position.cursor
            while line := _received(answer.readline):
                if line.startswith(b"id:"):
                    cursor = line.removeprefix(b"id:").strip().decode("ascii", "replace") or None
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = _json(data)
                if "error" in event:
                    if _code(event) not in _LOST:
                        position.moved(None)  # it would end so again
                    raise PeerLostError(f"the server ended the answer: {message_of(event)}")
                yield event
                position.moved(cursor)
        raise PeerLostError("the server was lost in the middle of the answer")

    def model(self) -> str:
        """The name of the first model that the server has."""
        models = self.get("/v1/models").get("data") or []
        if not models:
            raise NotFoundError(f"the server at {self.url} has no model")
        return str(models[0]["id"])

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        more: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, with its status checked; `more` are further headers."""
        headers = {"Accept": "application/json", **(more or {})}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        with closing(self.address.connect(self._timeout)) as connection:
            try:
                connection.request(method, self.address.prefix + path, data, headers)
                answer = connection.getresponse()
            except (BrokenPipeError, ConnectionResetError, http.client.HTTPException) as error:
                raise PeerLostError(f"{self.url} does not answer in HTTP: {error!r}") from error
            except OSError as error:
                raise self._unreachable(error) from error
            with answer:
                if answer.status != 200:
                    self._refuse(answer)
                yield answer

    def _unreachable(self, error: OSError) -> NotFoundError:
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or error
        if isinstance(error, socket.gaierror):
            why = "there is no such host"
        return NotFoundError(
            f"no server answers at {self.url} ({why}): start one with tpdet serve MODEL, or name "
            "another with --url"
        )

    def _refuse(self, answer: http.client.HTTPResponse) -> None:
        """Raise the error that the status stands for."""
        status, text = answer.status, _received(answer.read)
        try:
            body = json.loads(text)
            message = message_of(body)
        except ValueError:
            body = None
            message = text[:200].decode("utf-8", "replace") or answer.reason
        if status in (401, 403):
            raise NotPermittedError(
                f"the server at {self.url} wants an API key ({status}): give a file with it by "
                "--api-key-file, or set TPDET_API_KEY"
                if self._key is None
                else f"the server at {self.url} does not take this API key ({status})"
            )
        details = status, body, answer.getheader("x-request-id") or ""
        if status in _BUSY:
            busy = BusyError(f"the server takes no request now ({status}): {message}", *details)
            wait = answer.getheader("Retry-After") or ""
            busy.seconds = float(wait) if wait.isdigit() else BusyError.seconds
            raise busy
        if 400 <= status < 500:
            raise RefusedError(f"the server refuses the request ({status}): {message}", *details)
        raise HttpError(f"the server failed ({status}): {message}", *details)


def client_key(
    key_file: Path | None, environ: Mapping[str, str] | None = None, flag: str = "--api-key-file"
) -> str | None:
    """The API key to send: the first of the file, else TPDET_API_KEY or VLLM_API_KEY; or None.

    flag: the one that names the file. Raises what `read_private_file` raises, and UsageError for a
    file without a key.
    """
    if key_file is None:
        keys = read_key(os.environ if environ is None else environ)
        return None if keys is None else keys[0]
    data = read_private_file(str(key_file), flag, "one key a line", _MAX_KEY_FILE_BYTES)
    for line in data.decode("ascii", "replace").split("\n"):
        if line.strip() and not line.startswith("#"):
            if line.strip().startswith("sha256:"):
                raise UsageError(
                    f"{flag} {key_file} begins with a key's digest: a client needs the key"
                )
            return line.strip()
    raise UsageError(f"{flag} {key_file} holds no key: one key a line")


def _received(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except (OSError, http.client.HTTPException) as error:
        raise PeerLostError("the server was lost in the middle of the answer") from error


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise TpdetError(f"the server's answer is no JSON: {data[:100]!r}") from error


def _code(event: Any) -> str | None:
    """The code of an error event."""
    error = event.get("error")
    return error.get("code") if isinstance(error, dict) else None
