"""Request middleware, the outermost ASGI layer: request id, key, route, method and body.

Checks, in order: 401 (on unknown paths too), 404, 405, 411, 413, 415, 408, then 400 for the JSON.
Behind it a handler finds the parsed body and a future that resolves when the client goes away in
`scope["tpdet"]`. Every exception becomes an answer here, by one serialiser.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpdet.requests.answer.messages import is_of_messages, problem_body
from tpdet.requests.body import limits
from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.problems import ApiError, internal_error
from tpdet.server.about.operations import CONTROL_OPERATIONS, FILE_ROUTES, not_found
from tpdet.server.front.door import Door, header
from tpdet.server.front.log import CLIENT_GONE, log_access
from tpdet.server.http1.held_bytes import Hold
from tpdet.server.wire.protocol import new_request_id

_WITHOUT_BODY = {*CONTROL_OPERATIONS, "/v1/batches/{batch_id}/cancel"}
"""Routes on which a POST without a body is one without fields."""
_log = logging.getLogger("tpdet.server")


class ClientGone(Exception):
    """The client closed its connection: nobody is left to answer."""


@dataclass
class HttpExchange:
    """One HTTP request, as the middleware hands it to a handler.

    `body` is the parsed object; of a large body (see limits) it is empty, and another
    process parses `data`. `gone` resolves when the client closes the connection;
    `tenant_salt` stands for the client's key and is empty without keys. `tokens` is for the log:
    how many the prompt has and how many were generated, once a handler knows. `receipt`: whether
    the answer's receipt is named in a header. `parts`: the body as it comes, on routes that take
    files; `data` is empty then.
    """

    request_id: str
    tenant_salt: str
    body: dict[str, Any]
    data: bytes
    gone: asyncio.Future[None]
    tokens: tuple[int, int] | None = None
    hold: Hold | None = None
    receipt: bool = False
    parts: AsyncIterator[bytes] | None = None

    def release(self) -> None:
        """Let go of the body: it has been worked on."""
        self.body, self.data = {}, b""
        if self.hold is not None:
            self.hold.release()


class RequestMiddleware:
    """Wraps the application; `routes` are the application's own, so no path is listed twice."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[BaseRoute],
        door: Door,
        body_timeout: float,
        rejected: Callable[[str], None],
        process: int = 0,
    ) -> None:
        self._process = process
        self._app, self._routes, self._door = app, tuple(routes), door
        self._body_timeout, self._rejected = body_timeout, rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Never raises but for a fault of the server itself."""
        if scope["type"] != "http":
            return
        answer = _Answer(scope, send, new_request_id(self._process))
        if scope["method"] == "HEAD":  # answered as GET is; uvicorn leaves out the content
            scope = {**scope, "method": "GET"}
        reader = _BodyReader(scope, receive)
        gone: asyncio.Future[None] | None = None
        try:
            salt, route = self._check_head(scope)
            body, data, parts = {}, b"", None
            if route in FILE_ROUTES and scope["method"] == "POST":
                _check_length(reader)
                parts = reader.parts(limits.FILE_TIMEOUT)
            elif scope["method"] == "POST" and (reader.announced or route not in _WITHOUT_BODY):
                _check_body_headers(reader)
                data = await reader.read(self._body_timeout)
                body = await _parsed(data)
            leaving = _until_gone(receive) if parts is None else _never()
            gone = asyncio.ensure_future(leaving)
            hold = scope.get("tpdet_hold")
            scope["tpdet"] = HttpExchange(
                answer.request_id, salt, body, data, gone, hold=hold, parts=parts
            )
            del body, data
            await self._app(scope, receive, answer.send)
        except ClientGone:
            return
        except ApiError as problem:
            self._rejected(problem.code or problem.kind)
            await answer.refuse(problem, reader)
        except Exception:
            _log.exception("request %s failed", answer.request_id)
            await answer.refuse(internal_error(), reader)
        finally:
            if gone is not None:
                gone.cancel()
            if self._door.logs:
                answer.log()

    def _check_head(self, scope: Scope) -> tuple[str, str]:
        """The tenant's salt and the route's path. Raises ApiError: door, key, path, method."""
        salt = self._door.admit(scope)
        allowed: list[str] = []
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return salt, getattr(route, "path", "")
            if match is Match.PARTIAL:
                allowed += sorted(getattr(route, "methods", None) or ())
        if "GET" in allowed:
            allowed.append("HEAD")
        if not allowed:
            path = scope["path"]
            closed = path in CONTROL_OPERATIONS and not self._door.has_control
            raise ApiError(404, self._door.closed if closed else not_found(path), code="not_found")
        methods = ", ".join(allowed)
        raise ApiError(
            405,
            f"this path answers {methods} only",
            code="method_not_allowed",
            headers=(("allow", methods),),
        )


class _Answer:
    """The sending side: puts the request id on every answer and knows whether one has begun."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self._scope, self._send = scope, send
        self.request_id, self._status = request_id, 0
        self._begun = time.monotonic()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            name = self.request_id.encode()
            headers = [*message.get("headers", ()), (b"x-request-id", name)]
            if is_of_messages(self._scope["path"]):
                headers.append((b"request-id", name))
            exchange = self._scope.get("tpdet")
            if exchange is not None and exchange.receipt:
                headers.append((b"tpdet-receipt", name))
            message = {**message, "headers": headers}
        await self._send(message)

    def log(self) -> None:
        """The request's line in the log, once all is over."""
        exchange = self._scope.get("tpdet")
        tokens = None if exchange is None else exchange.tokens
        milliseconds = 1000 * (time.monotonic() - self._begun)
        status = self._status or CLIENT_GONE
        log_access(self._scope, self.request_id, status, milliseconds, tokens)

    async def refuse(self, problem: ApiError, reader: "_BodyReader") -> None:
        """Send an error; if the body is still arriving, take it in for a second before the end.

        A client that is still sending when the connection closes gets a reset, not the answer.
        """
        if self._status:
            return
        body = problem_body(problem, self._scope["path"], self.request_id)
        await send_problem(problem, body, self.send, finish=False, close=not reader.complete)
        hold: Hold | None = self._scope.get("tpdet_hold")
        if hold is not None:
            hold.release()
        await reader.discard(limits.DRAIN_BODY_TIMEOUT)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_problem(
    problem: ApiError, body: bytes, send: Send, *, finish: bool = True, close: bool = False
) -> None:
    """Write an error as a whole answer; without `finish` the caller ends it."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in problem.headers),
    ]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not finish})


class _BodyReader:
    """Reads a body once, up to the limit, in limited time."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self._receive = scope, receive
        length = header(scope, b"content-length")
        self.length = int(length) if length and length.isdigit() else None
        self.chunked = header(scope, b"transfer-encoding") is not None
        self.announced = bool(self.length) or self.chunked
        self.complete = not self.announced
        self.path: str = scope["path"]

    async def read(self, timeout: float) -> bytes:
        """The body. Raises ApiError 413 or 408, or ClientGone."""
        found = bytearray()  # many small parts cost no more than one large one
        async for part in self.parts(timeout):
            found += part
            if len(found) > limits.MAX_BODY_BYTES:
                raise _too_large()
        return bytes(found)

    async def parts(self, timeout: float) -> AsyncIterator[bytes]:
        """The body as it comes, within `timeout` seconds. Raises ApiError 408, or ClientGone."""
        deadline = asyncio.get_running_loop().time() + timeout
        more = True
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(408, "the request's body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            self.complete = not more
            yield message.get("body", b"")

    async def discard(self, timeout: float) -> None:
        """Drop the rest of the body, for at most `timeout` seconds."""
        if self.complete or header(self.scope, b"expect") is not None:
            return
        try:
            async with asyncio.timeout(timeout):
                more = True
                while more:
                    message = await self._receive()
                    more = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            return


def _check_length(reader: _BodyReader) -> None:
    if reader.length is None and not reader.chunked:
        raise ApiError(411, "a POST needs a Content-Length", headers=(("connection", "close"),))


def _check_body_headers(reader: _BodyReader) -> None:
    scope = reader.scope
    _check_length(reader)
    if reader.length is not None and reader.length > limits.MAX_BODY_BYTES:
        raise _too_large()
    given = header(scope, b"content-type") or b""
    kind, _, parameters = given.partition(b";")
    charset = parameters.replace(b" ", b"").lower()
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise ApiError(
            415,
            f"the body must be application/json in UTF-8{_but_not(given)}: send the header "
            "Content-Type: application/json",
            param="content-type",
        )
    if reader.chunked and (header(scope, b"transfer-encoding") or b"").lower() != b"chunked":
        raise ApiError(415, "the body may only be chunked", param="transfer-encoding")
    coding = header(scope, b"content-encoding")
    if coding not in (None, b"identity"):
        raise ApiError(
            415,
            f"the body must not be compressed{_but_not(coding)}: send it as it is",
            param="content-encoding",
        )


def _but_not(value: bytes | None) -> str:
    """A header's value as part of a message; nothing for an empty one."""
    return f", not {value.decode('latin-1')[:60]!r}" if value else ""


def _too_large() -> ApiError:
    return ApiError(413, f"the body is over {limits.MAX_BODY_BYTES} bytes: send less")


async def _parsed(body: bytes) -> dict[str, Any]:
    """The JSON object; a larger one is parsed in a thread, so that streams keep moving."""
    if len(body) > limits.LARGE_BODY_BYTES:
        return {}
    if len(body) <= limits.THREAD_BODY_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


async def _never() -> None:
    """Nothing resolves it: a file's reader sees the client leave by itself."""
    await asyncio.get_running_loop().create_future()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
