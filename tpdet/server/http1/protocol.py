"""uvicorn's httptools protocol with the limits it lacks: header size and count, timers, readers.

The parser accepts a header of megabytes, a hundred thousand headers, a head that never ends and a
reader that never reads. Each is cut here, before any application code runs for it. So are two
demands of RFC 9110 and 9112: fields behind a body are no headers, and a request has one Host.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tpdet.requests.body import limits
from tpdet.requests.body.problems import ApiError, from_code
from tpdet.server.http1.held_bytes import HEADER_OVERHEAD_BYTES, HeldBytes
from tpdet.server.http1.request_order import OrderedProtocol

# Headers that mean something here and may stand once: which of two would others believe?
_ONCE = (b"host", b"content-type", b"content-encoding", b"transfer-encoding")


class _Refused(Exception):
    """Stops the parser; the reason is in the protocol's `_refusal`."""


class GuardedProtocol(OrderedProtocol):
    """One connection. Refusals: 431 (headers), 408 (head too slow), a bare 400 (not HTTP), 503
    (all connections together hold too much).
    """

    header_timeout = limits.HEADER_TIMEOUT
    body_timeout = limits.BODY_TIMEOUT
    slow_reader_timeout = limits.SLOW_READER_TIMEOUT
    held = HeldBytes(limits.MAX_HELD_BYTES)
    count: Callable[[int], None] = staticmethod(lambda change: None)  # of open connections

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._head_bytes = 0
        self._trailers = 0
        self._refusal: ApiError | None = None
        self._late_refusal = False  # it is written once what came before it is answered
        self._discarding = False
        self._completed = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a head, for a limited time."""
        super().connection_made(transport)
        self.count(1)
        self._arm(self.header_timeout, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self.count(-1)
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
        self._unset_keepalive_if_required()
        self._feed(data)
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
        self._head_bytes = self._header_bytes = self._trailers = 0
        self._hold = self.held.hold(lambda: self._refuse(_overloaded()))
        self._holds.append(self._hold)
        self.scope["tpdet_hold"] = self._hold  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """Collect the target, up to its limit."""
        super().on_url(url)
        if len(self.url) > limits.MAX_URL_BYTES:
            self._stop(_header_error(f"the URL is over {limits.MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, up to the limits; a line counts with its colon, space and line end."""
        self._header_bytes += len(name) + len(value) + 4
        if self._phase == "body":  # behind a body in chunks: such fields never become headers
            self._trailers += 1
        else:
            super().on_header(name, value.strip(b" \t"))
            self._count(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        if len(self.headers) + self._trailers > limits.MAX_HEADERS:
            self._stop(_header_error(f"more than {limits.MAX_HEADERS} headers"))
        if self._header_bytes > limits.MAX_HEADER_BYTES:
            self._stop(_header_error(f"the headers are over {limits.MAX_HEADER_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """The head is whole: start the application, and wait for the body for a limited time."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        names = [name for name, _ in self.headers]
        if any(names.count(name) > 1 for name in _ONCE):
            self._stop(None)
        if b"host" not in names and self.parser.get_http_version() != "1.0":
            self._stop(None)
        if len(self.pipeline) >= limits.MAX_PIPELINED:
            self._stop(_header_error(f"more than {limits.MAX_PIPELINED} requests in a pipeline"))
        self._phase = "body"
        self._arm(self.body_timeout, self._body_overdue)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self._upgrading:
            return
        if self._hold is not None:
            self._hold.arrived()
        self._disarm()
        self._phase = "between"
        self._completed += 1
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._count(len(body))
        super().on_body(body)

    def _count(self, size: int) -> None:
        if self._hold is not None and not self._hold.add(size):
            self._stop(_overloaded())

    def _all_answered(self) -> None:
        if self._late_refusal:
            self._write_refusal()
        else:
            super()._all_answered()

    # Timers

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._read_timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

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

    def _stop(self, problem: ApiError | None) -> None:
        """Leave the parser; its error path ends in `send_400_response`."""
        self._refusal = problem
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed: the refusal if there is one, else a bare 400."""
        self._refuse(self._refusal)

    def _refuse(self, problem: ApiError | None) -> None:
        """End the connection with this answer, behind those that are still being written."""
        self._refusal = problem
        self._disarm()
        self._discarding = True
        if self._phase == "body" and self.pipeline:
            self._drop_newest()
        elif self._phase == "body" and self._busy():
            if self.cycle.response_started:
                self.transport.close()
                return
            # The fault is in the body the application waits for: to it nobody listens any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._busy():
            self._late_refusal = True
        else:
            self._write_refusal()

    def _write_refusal(self) -> None:
        """Write an answer without the application, then drop input for a second and close.

        Closing at once would reset the connection under a client that is still sending, which
        then never sees the answer.
        """
        self._unset_keepalive_if_required()
        problem = self._refusal
        status, body = (400, b"") if problem is None else (problem.status, problem.body())
        headers = (("content-type", "application/json"), *problem.headers) if problem else ()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
        self.transport.write(
            b"%scontent-length: %d\r\n%sx-request-id: %s\r\nconnection: close\r\n\r\n%s"
            % (STATUS_LINE[status], len(body), lines, secrets.token_hex(16).encode(), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(limits.DRAIN_BODY_TIMEOUT, self.transport.close)


def _overloaded() -> ApiError:
    return from_code(
        "engine_overloaded",
        f"requests of {limits.MAX_HELD_BYTES} bytes are arriving or waiting: try again later",
    )


def _header_error(message: str) -> ApiError:
    return ApiError(431, message + ": send less")
