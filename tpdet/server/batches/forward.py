"""Files and batches where several processes speak HTTP: the first one has them.

Each other process sends what it is asked on to the first, as HTTP over a Unix socket of mode 0600
in the run directory, and gives the answer back as it comes.
"""

import asyncio
from collections.abc import AsyncIterator
from string import punctuation
from urllib.parse import quote

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.requests.body.problems import from_code
from tpdet.server.front.door import API_KEY, TENANT
from tpdet.server.front.middleware import HttpExchange
from tpdet.server.wire.protocol import REFUSALS

_PORTION_BYTES = 64 << 10
_SENT_ON = (b"authorization", API_KEY, b"content-type")
_OWN = (b"date", b"server", b"transfer-encoding", b"x-request-id")
"""Headers that each process writes itself."""


class Forwarded(Response):
    """The first process's answer to a request."""

    def __init__(self, address: str) -> None:
        """address: the path of its socket."""
        super().__init__()
        self._address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it. Raises ApiError where the first process has ended, and what `parts` raises."""
        exchange: HttpExchange = scope["tpdet"]
        if exchange.parts is not None and exchange.hold is not None:
            exchange.hold.release()  # what comes is sent on
        try:
            reader, writer = await asyncio.open_unix_connection(self._address)
        except OSError:
            raise from_code(*REFUSALS["draining"]) from None
        connection = h11.Connection(h11.CLIENT)
        asking = asyncio.create_task(_ask(connection, scope, writer))
        answering = asyncio.create_task(_answer(connection, reader, send, exchange.gone))
        try:
            await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
            await answering
        except (OSError, h11.ProtocolError):
            raise from_code(*REFUSALS["draining"]) from None
        finally:
            asking.cancel()
            answering.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
            writer.close()


async def _ask(connection: h11.Connection, scope: Scope, writer: asyncio.StreamWriter) -> None:
    """Send the request on, a file as it comes. Raises what `parts` raises."""
    exchange: HttpExchange = scope["tpdet"]
    target, query = scope["raw_path"], scope["query_string"]
    headers = [(name, value) for name, value in scope["headers"] if name in _SENT_ON]
    headers += [(b"host", b"tpdet"), (TENANT, exchange.tenant_salt.encode())]
    if scope["method"] == "POST":
        named = dict(scope["headers"]).get(b"content-length")
        length = named if exchange.parts is not None else b"%d" % len(exchange.data)
        chunked = (b"transfer-encoding", b"chunked")
        headers.append(chunked if length is None else (b"content-length", length))
    target = quote(target + b"?" + query if query else target, safe=punctuation)
    head = h11.Request(method=scope["method"], target=target, headers=headers)
    writer.write(connection.send(head) or b"")
    try:
        async for part in exchange.parts or _whole(exchange.data):
            writer.write(connection.send(h11.Data(data=part)) or b"")
            await writer.drain()
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
    except ConnectionError:
        return  # it is refused before all of it came: the answer says why


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


async def _answer(
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    send: Send,
    gone: "asyncio.Future[None]",
) -> None:
    """Write the answer as it comes; ends early where nobody reads."""
    while not gone.done():
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_PORTION_BYTES))
        elif isinstance(event, h11.Response):
            headers = [(name, value) for name, value in event.headers if name not in _OWN]
            start = {"type": "http.response.start", "status": event.status_code}
            await send({**start, "headers": headers})
        elif isinstance(event, h11.Data):
            data = bytes(event.data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
