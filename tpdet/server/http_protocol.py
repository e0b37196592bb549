"""uvicorn's httptools protocol with the limits it lacks: header size and count, timers, readers.

The parser accepts a header of megabytes, a hundred thousand headers, a head that never ends and a
reader that never reads. Each is cut here, before any application code runs for it.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tpdet.server import limits
from tpdet.server.problems import ApiError


class _Refused(Exception):
    """Stops the parser; the reason is in the protocol's `_refusal`."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Refusals: 431 (headers), 408 (head too slow), a bare 400 (not HTTP)."""

    header_timeout = limits.HEADER_TIMEOUT
    body_timeout = limits.BODY_TIMEOUT
    slow_reader_timeout = limits.SLOW_READER_TIMEOUT

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._phase = "between"
        self._head_bytes = 0
        self._refusal: ApiError | None = None
        self._discarding = False
        self._completed = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a head, for a limited time."""
        super().connection_made(transport)
        self._arm(self.header_timeout, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._disarm()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, unless the connection has been refused: then what still arrives is dropped."""
        if self._discarding:
            return
        in_head, completed = self._phase == "head", self._completed
        super().data_received(data)
        if self._discarding or self.transport.is_closing():
            return
        if self._phase == "head" and in_head:
            # One header may grow for ever without a callback: count what has not become a head.
            self._head_bytes += len(data)
            if self._head_bytes > limits.MAX_HEADER_BYTES + limits.MAX_URL_BYTES:
                self._refuse(_header_error(f"the head is over {limits.MAX_HEADER_BYTES} bytes"))
                return
        # After a whole request uvicorn's own timer bounds the pause; blank lines have ended that.
        resting = self._phase == "between" and self._completed > completed
        if self._phase != "body" and not resting and self._read_timer is None:
            self._arm(self.header_timeout, self._head_overdue)

    # Parser callbacks

    def on_message_begin(self) -> None:
        """A request line begins."""
        super().on_message_begin()
        self._phase = "head"
        self._head_bytes = 0
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Collect the target, up to its limit."""
        super().on_url(url)
        if len(self.url) > limits.MAX_URL_BYTES:
            self._stop(_header_error(f"the URL is over {limits.MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, up to the limits; a line counts with its colon, space and line end."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        if len(self.headers) > limits.MAX_HEADERS:
            self._stop(_header_error(f"more than {limits.MAX_HEADERS} headers"))
        if self._header_bytes > limits.MAX_HEADER_BYTES:
            self._stop(_header_error(f"the headers are over {limits.MAX_HEADER_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """The head is whole: start the application, and wait for the body for a limited time."""
        if len(self.pipeline) >= limits.MAX_PIPELINED:
            self._stop(_header_error(f"more than {limits.MAX_PIPELINED} requests in a pipeline"))
        self._phase = "body"
        self._arm(self.body_timeout, self._body_overdue)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._disarm()
        self._phase = "between"
        self._completed += 1
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is simply not taken; no line in the log for each."""

    # Timers

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._read_timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _busy(self) -> bool:
        """Whether an answer is being made, so that nothing else may be written."""
        return self.cycle is not None and not (
            self.cycle.response_complete or self.cycle.disconnected
        )

    def _head_overdue(self) -> None:
        self._read_timer = None
        if self.transport.is_closing() or self._discarding:
            return
        if self._busy():
            self._arm(self.header_timeout, self._head_overdue)
        elif self._phase == "between":
            self.transport.close()
        else:
            self._refuse(ApiError(408, "the request's head did not arrive in time"))

    def _body_overdue(self) -> None:
        # The application has its own, shorter timer and answers 408; what is left here is a body
        # nobody reads, behind an answer that is out or in front of one that waits in the pipeline.
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self._busy():
            self._arm(self.body_timeout, self._body_overdue)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The reader is behind: give it some time, then cut it."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.slow_reader_timeout, self._reader_overdue)

    def resume_writing(self) -> None:
        """The reader caught up."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _reader_overdue(self) -> None:
        self._write_timer = None
        self.transport.abort()

    # Refusals

    def _stop(self, problem: ApiError) -> None:
        """Leave the parser; its error path ends in `send_400_response`."""
        self._refusal = problem
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed: the refusal if there is one, else a bare 400."""
        self._refuse(self._refusal)

    def _refuse(self, problem: ApiError | None) -> None:
        """Write an answer without the application, then drop input for a second and close.

        Closing at once would reset the connection under a client that is still sending, which
        then never sees the answer.
        """
        self._disarm()
        self._discarding = True
        if self._busy():
            if self._phase != "body" or self.pipeline or self.cycle.response_started:
                self.transport.close()
                return
            # The fault is in the body the application waits for: it is told that nobody listens.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        status, body = (400, b"") if problem is None else (problem.status, problem.body())
        kind = b"content-type: application/json\r\n" if body else b""
        self.transport.write(
            b"%scontent-length: %d\r\n%sx-request-id: %s\r\nconnection: close\r\n\r\n%s"
            % (STATUS_LINE[status], len(body), kind, secrets.token_hex(16).encode(), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(limits.DRAIN_BODY_TIMEOUT, self.transport.close)


def _header_error(message: str) -> ApiError:
    return ApiError(431, message + ": send less")
