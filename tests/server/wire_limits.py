"""Limits of heads, bodies and connections: at the boundary, one past it, far past it.

`WIRE_LIMITS[name](value)` makes the attempts on the limit `name` of the server's own table.
"""

import json
import math
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.lib.server.harness import MODEL, Server, read_all, request_bytes
from tests.server.limit_attempt import KIND, PATH, Attempt

JSON = "Content-Type: application/json"


def connect(server: Server) -> socket.socket:
    """A connection of its own."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def whole_answer(connection: socket.socket) -> bytes:
    """One answer with a JSON body that holds no other object."""
    found = b""
    while not found.endswith(b"}"):
        more = connection.recv(65536)
        assert more, found
        found += more
    return found


def raw(data: bytes) -> Callable[[Server], tuple[int, bytes]]:
    """Bytes on a connection of their own."""

    def send(server: Server) -> tuple[int, bytes]:
        head, _, body = server.raw(data).partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    return send


def body_bytes(limit: int) -> list[Attempt]:
    """A body of blanks behind a valid object; announced, and in chunks."""
    text = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()

    def whole(size: int) -> Callable[[Server], tuple[int, bytes]]:
        def send(server: Server) -> tuple[int, bytes]:
            found = server.http.post(PATH, content=text.ljust(size), headers=KIND)
            return found.status_code, found.content

        return send

    def chunked(size: int) -> Callable[[Server], tuple[int, bytes]]:
        def send(server: Server) -> tuple[int, bytes]:
            whole = text.ljust(size)
            parts = (whole[i : i + 2**20] for i in range(0, size, 2**20))
            found = server.http.post(PATH, content=parts, headers=KIND)
            return found.status_code, found.content

        return send

    announced = request_bytes(PATH, b"", JSON, f"Content-Length: {limit * 10**6}")
    return [
        Attempt("body at its limit", whole(limit), 200),
        Attempt("body one past", whole(limit + 1), 413),
        Attempt("body in chunks at its limit", chunked(limit), 200),
        Attempt("body in chunks one past", chunked(limit + 1), 413),
        Attempt("body announced far past", raw(announced), 413),
    ]


def json_depth(limit: int) -> list[Attempt]:
    """Arrays in arrays. What is not too deep is refused for what it is."""

    def nested(depth: int) -> Callable[[Server], tuple[int, bytes]]:
        data = b'{"prompt":"x","user":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        return raw(request_bytes(PATH, data, JSON, f"Content-Length: {len(data)}"))

    return [
        Attempt("depth at its limit", nested(limit), 400, "user", "valid string"),
        Attempt("depth one past", nested(limit + 1), 400, None, "nested"),
        Attempt("depth far past", nested(200_000), 400, None, "nested"),
    ]


def get(line: str, *headers: str) -> Callable[[Server], tuple[int, bytes]]:
    """A GET of a path."""
    return raw(request_bytes(line, b"", *headers, method="GET"))


def headers(limit: int) -> list[Attempt]:
    """Headers by number; two are there already."""
    return [
        Attempt(f"{count} headers", get("/health", *(f"X-{i}: y" for i in range(count - 2))), s)
        for count, s in ((limit, 200), (limit + 1, 431), (5000, 431))
    ]


def header_bytes(limit: int) -> list[Attempt]:
    """One header that makes the head so many bytes, line ends and all."""
    used = len("Host: x\r\nConnection: close\r\nX: \r\n")
    return [
        Attempt(f"{size} header bytes", get("/health", "X: " + "v" * (size - used)), status)
        for size, status in ((limit, 200), (limit + 1, 431), (4 << 20, 431))
    ]


def url_bytes(limit: int) -> list[Attempt]:
    """A path that leads nowhere, if it is read at all."""
    return [
        Attempt(f"{size} bytes of URL", get("/".ljust(size, "u")), status)
        for size, status in ((limit, 404), (limit + 1, 431), (2 << 20, 431))
    ]


def pipelined(limit: int) -> list[Attempt]:
    """Requests that wait behind the one that is answered."""
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    def all_of(count: int) -> Callable[[Server], tuple[int, bytes]]:
        def send(server: Server) -> tuple[int, bytes]:
            try:
                answers = server.raw(one * (count - 1) + last).count(b"HTTP/1.1 200")
            except ConnectionError:
                answers = 0
            assert (answers == count) is (count <= limit + 1), (answers, count)
            return 200, b""

        return send

    return [Attempt(f"{n} in a pipeline", all_of(n), 200) for n in (limit + 1, limit + 2, 5000)]


def waited(parts: tuple[bytes, bytes], limit: float) -> list[Attempt]:
    """A request in two parts: the second within the limit, or never."""

    def send(pause: float) -> Callable[[Server], tuple[int, bytes]]:
        def run(server: Server) -> tuple[int, bytes]:
            with connect(server) as connection:
                connection.sendall(parts[0])
                if pause < limit:
                    time.sleep(pause)
                    connection.sendall(parts[1])
                began = time.monotonic()
                head, _, body = read_all(connection).partition(b"\r\n\r\n")
            assert pause < limit or time.monotonic() - began > 0.8 * limit
            return int(head.split()[1]), body

        return run

    return [
        Attempt("in two parts in time", send(limit / 3), 200),
        Attempt("the second part never comes", send(math.inf), 408),
    ]


def header_timeout(limit: float) -> list[Attempt]:
    """A head in two parts."""
    return waited((b"GET /health HTTP/1.1\r\nHo", b"st: x\r\nConnection: close\r\n\r\n"), limit)


def body_timeout(limit: float) -> list[Attempt]:
    """A body in two parts."""
    data = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    whole = request_bytes(PATH, data, JSON, f"Content-Length: {len(data)}")
    return waited((whole[:-9], whole[-9:]), limit)


def keep_alive(limit: float) -> list[Attempt]:
    """A connection that says nothing after an answer."""
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"

    def send(server: Server) -> tuple[int, bytes]:
        with connect(server) as connection:
            for pause in (0.0, limit / 3):
                time.sleep(pause)
                connection.sendall(one)
                assert whole_answer(connection).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            assert read_all(connection) == b"" and time.monotonic() - began > 0.8 * limit
        return 200, b""

    def blank(server: Server) -> tuple[int, bytes]:
        with connect(server) as connection:
            connection.sendall(one)
            assert whole_answer(connection).startswith(b"HTTP/1.1 200")
            connection.sendall(b"\r\n")  # nothing, but it ends the wait for the next request
            began = time.monotonic()
            assert read_all(connection) == b"" and time.monotonic() - began < limit + 15
        return 200, b""

    return [
        Attempt("a connection that is kept", send, 200),
        Attempt("a connection that gets a blank line", blank, 200),
    ]


def discarded(limit: float) -> list[Attempt]:
    """What is refused by its head is read on, but not for long: the answer must not be lost."""
    head = request_bytes(PATH, b"", JSON, "Content-Length: 99999999")

    def send(server: Server) -> tuple[int, bytes]:
        with connect(server) as connection:
            connection.sendall(head + b"{" * 1000)
            began = time.monotonic()
            answer = read_all(connection)
            assert 0.8 * limit < time.monotonic() - began < limit + 2.0
        head_, _, body = answer.partition(b"\r\n\r\n")
        return int(head_.split()[1]), body

    return [Attempt("a body nobody reads", send, 413)]


WIRE_LIMITS: dict[str, Callable[[Any], list[Attempt]]] = {
    "body_bytes": body_bytes,
    "json_depth": json_depth,
    "headers": headers,
    "header_bytes": header_bytes,
    "url_bytes": url_bytes,
    "pipelined_requests": pipelined,
    "header_timeout_seconds": header_timeout,
    "body_timeout_seconds": body_timeout,
    "keep_alive_timeout_seconds": keep_alive,
    "discarded_body_seconds": discarded,
}
