"""A proxy on loopback between one client and one server: it passes bodies on as they are.

Each request is a turn. Its answer comes from the server, piece by piece, or from what is replayed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import h11
import msgspec

from tpdet.client.address import Address
from tpdet.errors import PeerLostError, TpdetError
from tpdet.tools.tape.tape_file import ENDS, Ended, Turn, bytes_of, content_of
from tpdet.tools.tape.upstream import AnswerHead, Asked, Headers, ask, passed_on

Replay = Callable[[Turn], Turn | None]
"""The answer to a turn that has none yet, from a tape; None: ask the server. Raises TpdetError."""
_READ = 65536


class Proxy:
    """Answers connections of clients (`serve`), and tells of each turn once its answer has ended.

    `stopped`: ends with the error for which no more is answered.
    """

    def __init__(self, address: Address, replay: Replay, ended: Callable[[Turn], None]) -> None:
        self._address, self._replay, self._ended = address, replay, ended
        self._turns = 0
        self._open: set[asyncio.Task[None]] = set()
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        client = _Client(reader, writer)
        try:
            while not self.stopped.done() and (asked := await client.next_request()) is not None:
                await self._turn(asked, client)
                if not client.begin_next():
                    break
        except (h11.ProtocolError, OSError):
            pass  # what is no HTTP has no answer
        finally:
            self._open.discard(task)
            client.close()

    async def close(self, seconds: float) -> None:
        """Let open answers end for so long, then cut them off."""
        waiting = {*self._open}
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _turn(self, asked: Asked, client: "_Client") -> None:
        self._turns += 1
        turn = Turn(
            turn=self._turns,
            method=asked.method,
            path=asked.target,
            request=content_of(asked.body),
            ended="client_left",
        )
        answer = _AnswerSoFar(turn)
        try:
            recorded = self._replay(turn)
        except TpdetError as error:
            if not self.stopped.done():
                self.stopped.set_exception(error)
            client.abort()
            return
        try:
            if recorded is None:
                await client.unless_gone(self._from_server(asked, answer, client))
            else:
                await client.unless_gone(_from_tape(recorded, answer, client))
        finally:
            self._ended(answer.turn)
            if answer.ended == "server_lost":
                client.abort()

    async def _from_server(self, asked: Asked, answer: "_AnswerSoFar", client: "_Client") -> None:
        try:
            async with aclosing(ask(self._address, asked)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        answer.head = piece
                        await client.begin(piece.status, piece.headers)
                    else:
                        answer.pieces.append(piece)
                        await client.send(piece)
        except PeerLostError:
            answer.ended = "server_lost"
            return
        await client.end()
        answer.ended = "whole" if answer.head is not None else "server_lost"


class _AnswerSoFar:
    """An answer so far, and the turn that it makes."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.pieces: list[bytes] = []
        self.head: AnswerHead | None = None
        self.ended: Ended = "client_left"
        self.source = turn.source

    @property
    def turn(self) -> Turn:
        """The turn as it stands on a tape."""
        data, head, ended = b"".join(self.pieces), self.head, self.ended
        is_stream = head is not None and head.event_stream
        if ended == "client_left" and is_stream and data.endswith(ENDS):
            ended = "whole"  # clients of streams leave at this mark
        return msgspec.structs.replace(
            self._turn,
            status=None if head is None else head.status,
            event_stream=is_stream,
            answer=content_of(data),
            ended=ended,
            source=self.source,
        )


async def _from_tape(recorded: Turn, answer: _AnswerSoFar, client: "_Client") -> None:
    """What was recorded, and its end: one that the client left waits for it to leave again."""
    answer.source = recorded.source
    data = bytes_of(recorded.answer)
    if recorded.status is not None:
        kind = b"text/event-stream; charset=utf-8" if recorded.event_stream else b"application/json"
        headers = [(b"content-type", kind)]
        if recorded.ended == "whole" and not recorded.event_stream:
            headers.append((b"content-length", str(len(data)).encode()))
        answer.head = AnswerHead(recorded.status, headers, recorded.event_stream)
        await client.begin(recorded.status, headers)
        answer.pieces.append(data)
        await client.send(data)
    if recorded.ended == "client_left":
        await asyncio.Event().wait()
    if recorded.ended == "whole":
        await client.end()
    answer.ended = recorded.ended


class _Client:
    """One connection of a client, as h11 reads and writes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = h11.Connection(h11.SERVER)

    async def next_request(self) -> Asked | None:
        """The next whole request; None once the client has left. Raises h11.ProtocolError."""
        head: h11.Request | None = None
        body: list[bytes] = []
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                if self._connection.they_are_waiting_for_100_continue:
                    await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                self._connection.receive_data(await self._reader.read(_READ))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                names = head.method.decode(), head.target.decode()
                return Asked(*names, passed_on([*head.headers]), b"".join(body))
            else:
                return None

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of an answer."""
        await self._write(h11.Response(status_code=status, headers=[*headers]))

    async def send(self, data: bytes) -> None:
        """Send a piece of its body."""
        if data:
            await self._write(h11.Data(data=data))

    async def end(self) -> None:
        """Send its end."""
        await self._write(h11.EndOfMessage())

    async def unless_gone(self, give: Coroutine[Any, Any, None]) -> None:
        """Give an answer, to its end or until the client leaves."""
        answering = asyncio.ensure_future(give)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    def begin_next(self) -> bool:
        """Whether the connection takes another request."""
        states = {self._connection.our_state, self._connection.their_state}
        if states != {h11.DONE}:
            return False
        self._connection.start_next_cycle()
        return True

    def abort(self) -> None:
        """Cut the connection off."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _gone(self) -> None:
        """Return once the client has left; what it sends meanwhile is its next request."""
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(_READ):
                self._connection.receive_data(data)

    async def _write(self, event: h11.Event) -> None:
        self._writer.write(self._connection.send(event) or b"")
        await self._writer.drain()
