"""uvicorn's httptools protocol with what RFC 9110 and 9112 ask of the order of requests.

Requests that came before an error, or before the client stopped sending, are answered first. An
offered upgrade changes nothing. Each request has an account of the bytes it holds.
"""

from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tpdet.server.http1.half_close import ReaderWatch
from tpdet.server.http1.held_bytes import Hold


class PartWriter:
    """The connection of one answer: writes parts without a task that waits for it."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the answer is a running stream whose reader is there and not behind."""
        cycle = self._cycle
        running = cycle.chunked_encoding and not (cycle.disconnected or cycle.response_complete)
        return bool(running) and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a part that is not empty; only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class OrderedProtocol(HttpToolsProtocol):
    """One connection.

    `_phase` is "between" requests, in a "head" or in a "body". In a request's scope `tpdet_hold` is
    its Hold, `tpdet_writer` writes its answer's parts without a task, and `tpdet_probe` may be set
    to bytes that may stand between parts of its answer.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._phase = "between"
        self._upgrading = False
        self._running: RequestResponseCycle | None = None
        self._hold: Hold | None = None  # of the newest request
        self._holds: list[Hold] = []  # of the requests that are not answered yet
        self._reader_watch: ReaderWatch | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request that its client is gone, and release all of them."""
        if self._reader_watch is not None:
            self._reader_watch.stop()
        for hold in self._holds:
            hold.release()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the newest request alone, which may wait behind this one.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: answer what is whole, as long as somebody reads."""
        if self._phase == "body" and self.pipeline:
            self._drop_newest()
        waiting = self._running is not None and self._busy() and self._phase != "body"
        if not waiting or self._reader_watch is not None:
            return False
        if self._running is not None and self._running.scope["http_version"] == "1.0":
            return False  # nothing may be sent to ask whether it reads
        self._reader_watch = ReaderWatch(self.transport, self._probe)
        return True

    def _probe(self) -> None:
        """Send bytes without a meaning, which a gone client answers with a reset."""
        cycle = self._running
        if cycle is None or cycle.response_complete:
            return
        comment: Any = cycle.scope.get("tpdet_probe")
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif comment and cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%s\r\n" % (len(comment), comment))

    def _feed(self, data: bytes) -> None:
        """Parse; a head that offers an upgrade is parsed again without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrading:  # CONNECT
                    self.send_400_response("")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last; sets a fresh parser for it."""
        version = self.parser.get_http_version().encode()
        head = self.parser.get_method() + b" " + self.url + b" HTTP/" + version + b"\r\n"
        for name, value in self.headers:
            if name == b"connection":
                options = [one.strip() for one in value.split(b",")]
                kept = [one for one in options if one.lower() not in (b"upgrade", name)]
                value = b", ".join(kept)
            if name != b"upgrade":
                head += name + b": " + value + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._forget_newest()
        self._upgrading = False
        return head + b"\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["tpdet_writer"] = PartWriter(cycle)  # type: ignore[typeddict-unknown-key]
        without_chunks = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(
            cycle, self._until_it_closes(cycle, app) if without_chunks else app
        )

    @staticmethod
    def _until_it_closes(cycle: RequestResponseCycle, app: Any) -> Any:
        """An application whose answers of no stated length end with the connection.

        HTTP/1.0 has no chunks, which uvicorn would send; it closes such connections.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_bare(message: Message) -> None:
                if message["type"] == "http.response.start":
                    names = {name.lower() for name, _ in message.get("headers", ())}
                    if b"content-length" not in names:
                        cycle.chunked_encoding = False
                elif not cycle.expected_content_length:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, send_bare)

        return answer

    def on_response_complete(self) -> None:
        """Start the next request, or end the connection as the last one left it."""
        if self._running is not None:
            hold = self._running.scope["tpdet_hold"]  # type: ignore[typeddict-item]
            hold.release()
            self._holds.remove(hold)
            self._running = None
        super().on_response_complete()
        if self.transport.is_closing() or self._running is not None:
            return
        self._all_answered()

    def _all_answered(self) -> None:
        """Nothing that was asked waits any more."""
        if self._reader_watch is not None:
            self.transport.close()

    def _drop_newest(self) -> None:
        """Forget a request whose body will not come whole, behind others that are answered."""
        self.pipeline.popleft()
        self._forget_newest()
        self._phase = "between"
        if self._running is not None:
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running

    def _forget_newest(self) -> None:
        if self._holds:
            self._holds.pop().release()

    def _busy(self) -> bool:
        """Whether an answer is being made, so that nothing else may be written."""
        return self.cycle is not None and not (
            self.cycle.response_complete or self.cycle.disconnected
        )
