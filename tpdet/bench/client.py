"""One streamed completion over HTTP/1.1, with the time of each piece as it arrives."""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from tpdet.errors import NotPermittedError, UsageError

_CHUNK = 1 << 16
_DATA = b"data:"


@dataclass(frozen=True)
class Address:
    """Where a server listens; `prefix` is the path before `/v1`.

    flag: the one that named it; key_flag: the one that gives its API key.
    """

    host: str
    port: int
    secure: bool
    prefix: str
    flag: str = "--base-url"
    key_flag: str = "--api-key-file"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(
        cls, url: str, flag: str = "--base-url", key_flag: str = "--api-key-file"
    ) -> "Address":
        """From http://host:port, with or without /v1. Raises UsageError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{flag} {url!r}: use http://host:port")
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{flag} {url!r}: {error}") from error
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        port = port or (443 if secure else 80)
        return cls(parts.hostname, port, secure, prefix, flag, key_flag)


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


async def get_json(address: Address, path: str, headers: Mapping[str, str]) -> Any:
    """The JSON at a path. Raises UsageError when the server does not answer with it, and
    NotPermittedError when it wants another key.
    """
    try:
        reader, writer = await _connect(address)
        try:
            writer.write(_request(address, "GET", path, headers, b""))
            response = _Response()
            while not response.done and (data := await reader.read(_CHUNK)):
                response.parser.feed_data(data)
        finally:
            writer.close()
        status, content = response.parser.get_status_code(), bytes(response.body)
    except (OSError, ValueError, httptools.HttpParserError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number is not None and number > 0 else error
        raise UsageError(
            f"no server answers at {address} ({why}): start one with tpdet serve MODEL, or name "
            f"another with {address.flag}"
        ) from error
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


def said(content: bytes) -> str:
    """What the body of an error says, in at most 200 characters."""
    try:
        found = json.loads(content)
        error = found.get("error", found) if isinstance(found, dict) else found
        return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
    except ValueError:
        return content[:200].decode("utf-8", "replace")


async def stream(
    address: Address, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> Answer:
    """POST a body with `stream` set and read its events to the end; errors stand in the answer."""
    answer = Answer(sent=time.perf_counter())
    try:
        reader, writer = await _connect(address)
        try:
            answer.sent = time.perf_counter()
            writer.write(_request(address, "POST", path, headers, json.dumps(body).encode()))
            await _read_events(reader, answer)
        finally:
            writer.close()
    except (OSError, ValueError, httptools.HttpParserError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        answer.error = answer.error or f"{kind}{error}"
    answer.ended = time.perf_counter()
    return answer


async def _read_events(reader: asyncio.StreamReader, answer: Answer) -> None:
    response, finished = _Response(), False
    while not response.done:
        data = await reader.read(_CHUNK)
        now = time.perf_counter()
        if not data:
            break
        response.parser.feed_data(data)
        status = response.parser.get_status_code()
        if status != 200:
            if response.done:
                raise ValueError(f"status {status}: {said(bytes(response.body))}")
            continue
        for line in response.lines():
            if line.startswith(_DATA):
                finished = _take(line.removeprefix(_DATA).strip(), now, answer) or finished
    if not finished and answer.error is None:
        answer.error = "the stream ended before its [DONE]"


def _take(event: bytes, now: float, answer: Answer) -> bool:
    """Note one event; whether it was the last."""
    if event == b"[DONE]":
        return True
    found = json.loads(event)
    if "error" in found:
        answer.error = str(found["error"])
        return True
    if found.get("choices"):
        answer.pieces.append(now)
    if usage := found.get("usage"):
        answer.input_tokens = usage.get("prompt_tokens", 0)
        answer.output_tokens = usage.get("completion_tokens", 0)
    return False


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if address.secure else None
    return await asyncio.open_connection(address.host, address.port, ssl=context)


def _request(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> bytes:
    lines = [
        f"{method} {address.prefix}{path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
