"""HTTP to the server behind the proxy: a request's bytes as they are, its answer as it comes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

import h11

from tpdet.client.address import Address, message_of
from tpdet.client.connection import TRIES
from tpdet.errors import PeerLostError, RequestError

Headers = Sequence[tuple[bytes, bytes]]
_READ = 65536
_BUSY = (429, 503)
_OF_A_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"expect", b"host", b"accept-encoding",
})  # fmt: skip
"""Headers of a connection, and of a body's coding on it: each side of a proxy has its own."""


class Asked(NamedTuple):
    """A request: its target is the path with its query."""

    method: str
    target: str
    headers: Headers
    body: bytes


class AnswerHead(NamedTuple):
    """Status and headers of an answer, without those of its connection."""

    status: int
    headers: Headers
    event_stream: bool


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that are not of a connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


async def ask(address: Address, asked: Asked) -> AsyncGenerator[AnswerHead | bytes, None]:
    """The head of the server's answer, then its body, piece by piece as it comes.

    Raises PeerLostError if there is no server, or no end of its answer. Closing the iterator closes
    the connection, which stops the answer.
    """
    try:
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=address.context
        )
    except OSError as error:
        raise PeerLostError(f"no server answers at {address} ({error})") from None
    connection = h11.Connection(h11.CLIENT)
    try:
        name = f"[{address.host}]" if ":" in address.host else address.host
        host = f"{name}:{address.port}".encode()
        headers = [
            (b"host", host), (b"connection", b"close"), (b"accept-encoding", b"identity"),
            *(header for header in passed_on(asked.headers) if header[0] != b"content-length"),
        ]  # fmt: skip
        if asked.body or asked.method not in ("GET", "HEAD"):
            headers.append((b"content-length", str(len(asked.body)).encode()))
        target = address.prefix + asked.target
        head = h11.Request(method=asked.method, target=target, headers=headers)
        sent: tuple[h11.Event, ...] = head, h11.Data(data=asked.body), h11.EndOfMessage()
        for event in sent:
            writer.write(connection.send(event) or b"")
        await writer.drain()
        async for event in _events(connection, reader):
            if isinstance(event, h11.Response):
                yield _head(event)
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
    except (OSError, h11.ProtocolError) as error:
        raise PeerLostError(f"the server at {address} was lost ({error})") from None
    finally:
        writer.close()


async def post_json(address: Address, path: str, body: Any, key: str | None) -> Any:
    """The JSON that answers a body; a busy server is asked again a second later, TRIES times.

    Raises PeerLostError, and RequestError for what the server refuses.
    """
    headers = [(b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    asked = Asked("POST", path, headers, json.dumps(body).encode())
    for again in range(TRIES):
        status, text = 0, b""
        async for piece in ask(address, asked):
            if isinstance(piece, AnswerHead):
                status = piece.status
            else:
                text += piece
        if status not in _BUSY or again == TRIES - 1:
            break
        await asyncio.sleep(1.0)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"the server's answer ({status}) is no JSON") from None
    if status != 200:
        raise RequestError(f"the server refuses it ({status}): {message_of(answer)}")
    return answer


async def _events(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[h11.Event]:
    """What the server sends, to the end of its answer. Raises h11.ProtocolError if it has none."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ))
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return
        elif isinstance(event, h11.Event):
            yield event


def _head(response: h11.Response) -> AnswerHead:
    headers = [*response.headers]
    kinds = [value for name, value in headers if name == b"content-type"]
    is_stream = any(kind.lower().startswith(b"text/event-stream") for kind in kinds)
    return AnswerHead(response.status_code, passed_on(headers), is_stream)
