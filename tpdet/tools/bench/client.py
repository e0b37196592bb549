"""One streamed completion over HTTP/1.1, with the time of each piece as it arrives.

A load has a client of its own, on one event loop: hundreds of blocking connections (`Connection`)
would wait for each other's threads, and their pieces would have the times of those.
"""

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar

import httptools
import msgspec
import uvloop

from tpdet.client.address import Address, said
from tpdet.errors import NotPermittedError, UsageError

_TIMEOUT = 600.0  # seconds
_DATA = b"data:"
Result = TypeVar("Result")


@dataclass
class Answer:
    """What one request saw: seconds by `time.perf_counter`, and the server's own counts.

    `pieces` are the times at which tokens arrived. `error` is None if all went well.
    """

    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _Response:
    """Collects a response; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.done = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True

    def lines(self) -> list[bytes]:
        """Whole lines that came since the last call."""
        *lines, rest = self.body.split(b"\n")
        self.body = bytearray(rest)
        return [bytes(line).strip() for line in lines]


def get_text(address: Address, path: str, headers: Mapping[str, str]) -> str | None:
    """The text at a path; None where the server has none. Raises UsageError if none answers."""
    status, content = _get(address, path, headers)
    return content.decode("utf-8", "replace") if status == 200 else None


def _get(address: Address, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    try:
        with closing(address.connect(_TIMEOUT)) as connection:
            connection.request("GET", address.prefix + path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
    except (OSError, ValueError, HTTPException) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number is not None and number > 0 else error
        raise UsageError(
            f"no server answers at {address} ({why}): start one with tpdet serve MODEL, or name "
            f"another with {address.flag}"
        ) from error


def get_json(address: Address, path: str, headers: Mapping[str, str]) -> Any:
    """The JSON at a path. Raises UsageError when the server does not answer with it, and
    NotPermittedError when it wants another key.
    """
    status, content = _get(address, path, headers)
    if status == 200:
        try:
            return json.loads(content)
        except ValueError as error:
            raise UsageError(f"{path} answers with what is no JSON: {said(content)}") from error
    if status in (401, 403):
        if "Authorization" in headers:
            raise NotPermittedError(
                f"the server at {address} does not take this API key ({status}): give another by "
                f"{address.key_flag}"
            )
        # A variable holds the key of our own server: no other is sent it.
        variable = ", or set TPDET_API_KEY" if address.key_flag == "--api-key-file" else ""
        raise NotPermittedError(
            f"the server at {address} wants an API key ({status}): give a file with it by "
            f"{address.key_flag}{variable}"
        )
    raise UsageError(f"{path} answers with status {status}: {said(content)}")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What is read of an event; other fields are passed over."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Stream(asyncio.Protocol):
    """Reads the events of one answer as they arrive; `ended` resolves at the end."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._response = answer, _Response()
        self._finished = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            self._read(data, now)
        except (ValueError, msgspec.MsgspecError, httptools.HttpParserError) as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _read(self, data: bytes, now: float) -> None:
        response = self._response
        response.parser.feed_data(data)
        status = response.parser.get_status_code()
        if status != 200:
            if response.done:
                raise ValueError(f"status {status}: {said(bytes(response.body))}")
            return
        for line in response.lines():
            if line.startswith(_DATA):
                self._take(line.removeprefix(_DATA).strip(), now)
        if response.done:
            self._end(None)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        event, answer = _decode_event(data), self._answer
        if event.error is not None:
            answer.error = str(event.error)
        if event.choices:
            answer.pieces.append(now)
        if event.usage is not None:
            answer.input_tokens = event.usage.prompt_tokens
            answer.output_tokens = event.usage.completion_tokens

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is not None:
            self.ended.set_exception(error)
            return
        if not self._finished and self._answer.error is None:
            self._answer.error = "the stream ended before its [DONE]"
        self.ended.set_result(None)


async def stream(
    address: Address, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> Answer:
    """POST a body with `stream` set and read its events to the end; errors stand in the answer."""
    answer = Answer(sent=time.perf_counter())
    data = _request(address, path, headers, json.dumps(body).encode())
    try:
        transport, reader = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(answer), address.host, address.port, ssl=address.context
        )
        try:
            answer.sent = time.perf_counter()
            transport.write(data)
            await reader.ended
        finally:
            transport.close()
    except (OSError, ValueError, msgspec.MsgspecError, httptools.HttpParserError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        answer.error = answer.error or f"{kind}{error}"
    answer.ended = time.perf_counter()
    return answer


def run_load(load: Coroutine[Any, Any, Result]) -> Result:
    """Run a load on an event loop that takes little time for an event."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load)


def _request(address: Address, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"Host: {address}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
