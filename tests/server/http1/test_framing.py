"""How requests follow each other on a connection: upgrades, trailers, errors, half-closes."""

import json
import socket
import time

import pytest

from tests.lib.server.harness import MODEL, Server, eventually, read_all
from tests.server.streams import running

PATH = "/v1/completions"
KIND = "Content-Type: application/json"
BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 1}).encode()
LENGTH = f"Content-Length: {len(BODY)}"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
WEBSOCKET = ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"))
    yield found
    assert found.stop() == 0, found.log.read_text()


def head(*lines: str, first: str = f"POST {PATH} HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode()


def statuses(answer: bytes) -> list[int]:
    """Of the answers in a row, the interim ones left out."""
    found = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    return [status for status in found if status != 100]


@pytest.mark.parametrize("pieces", [1, 3, 50])
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_that_is_offered_changes_nothing(server, offer, chunked, pieces):
    if chunked:
        data = head("Host: x", KIND, "Transfer-Encoding: chunked", *offer) + CHUNKED + b"\r\n"
    else:
        data = head("Host: x", KIND, LENGTH, *offer) + BODY
    get = head("Host: x", *offer, first="GET /version HTTP/1.1")
    data = data + get + data + LAST
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        size = -(-len(data) // pieces)
        for i in range(0, len(data), size):
            connection.sendall(data[i : i + size])
            time.sleep(0.002 if pieces > 1 else 0)
        answer = read_all(connection)
    assert statuses(answer) == [200] * 4
    texts = [
        json.loads(part[: part.rindex(b"}") + 1])["choices"][0]["text"]
        for part in answer.split(b"\r\n\r\n")
        if part.startswith(b'{"id"')
    ]
    assert texts == [server.complete(max_tokens=3, seed=1).json()["choices"][0]["text"]] * 2
    assert statuses(
        server.raw(
            head(
                "Host: x",
                "Connection: Upgrade, close",
                "Upgrade: h2c",
                first="GET /version HTTP/1.1",
            )
        )
    ) == [200]


def test_fields_behind_a_body_are_no_headers(server):
    trailer = CHUNKED + KIND.encode() + b"\r\nAuthorization: Bearer x\r\n\r\n"
    data = head("Host: x", "Transfer-Encoding: chunked", "Connection: close") + trailer
    assert statuses(server.raw(data)) == [415]
    data = head("Host: x", KIND, "Transfer-Encoding: chunked") + CHUNKED + b"Host: y\r\n\r\n" + LAST
    assert statuses(server.raw(data)) == [200, 200]
    many = CHUNKED + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n"
    data = head("Host: x", KIND, "Transfer-Encoding: chunked", "Connection: close") + many
    assert statuses(server.raw(data)) == [431]


def test_a_key_behind_a_body_is_none(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-test\n")
    keys.chmod(0o600)
    server = Server(tmp_path, "--api-key-file", str(keys))
    key = "Authorization: Bearer sk-test"
    data = head("Host: x", KIND, "Transfer-Encoding: chunked", "Connection: close")
    assert statuses(server.raw(data + CHUNKED + key.encode() + b"\r\n\r\n")) == [401]
    data = head("Host: x", KIND, key, "Transfer-Encoding: chunked", "Connection: close")
    assert statuses(server.raw(data + CHUNKED + b"\r\n")) == [200]
    assert server.stop() == 0


@pytest.mark.parametrize("blanks", ["  ", "\t", " \t "])
def test_blanks_around_a_value_are_no_part_of_it(server, blanks):
    data = head("Host: x", f"{KIND}{blanks}", f"{LENGTH}{blanks}", "Connection: close" + blanks)
    assert statuses(server.raw(data + BODY)) == [200]
    data = head("Host: x", KIND, "Transfer-Encoding:   chunked  ", "Connection: close")
    assert statuses(server.raw(data + CHUNKED + b"\r\n")) == [200]


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01garbage\r\n\r\n", b"GET / HTTP/1.1\r\nHost : x\r\n\r\n"]
)
def test_what_was_asked_before_garbage_is_answered_first(server, garbage):
    post = head("Host: x", KIND, LENGTH) + BODY
    assert statuses(server.raw(post + garbage)) == [200, 400]
    assert statuses(server.raw(post * 3 + garbage)) == [200] * 3 + [400]
    close = head("Host: x", KIND, LENGTH, "Connection: close") + BODY
    assert statuses(server.raw(close + garbage)) == [200]
    broken = head("Host: x", KIND, "Transfer-Encoding: chunked") + b"zz\r\n"
    assert statuses(server.raw(post + broken)) == [200, 400]
    assert statuses(server.raw(post + post + broken)) == [200, 200, 400]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_half_closed_connection_gets_its_answers(server, streamed):
    fields = json.loads(BODY) | {"stream": streamed, "cache_salt": "slow=0.15", "max_tokens": 6}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    post = head("Host: x", KIND, f"Content-Length: {len(body)}") + body
    for count in (1, 2):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(post * count)
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        assert statuses(answer) == [200] * count
        assert answer.count(b'"replay_digest"') == count
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head("Host: x", KIND, LENGTH) + BODY[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""  # the rest of the body will never come
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


@pytest.mark.parametrize("streamed", [False, True])
def test_an_older_client_gets_no_chunks(server, streamed):
    """HTTP/1.0: what has no length ends with the connection."""
    body = json.dumps(json.loads(BODY) | {"stream": streamed}).encode()
    answers = []
    for version in ("1.0", "1.1"):
        lines = ("Host: x", KIND, "Connection: keep-alive", f"Content-Length: {len(body)}")
        if version == "1.1":
            lines = (*lines[:2], "Connection: close", lines[3])
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head(*lines, first=f"POST {PATH} HTTP/{version}") + body)
            answers.append(read_all(connection))
    older, newer = (answer.partition(b"\r\n\r\n") for answer in answers)
    assert b"transfer-encoding" not in older[0].lower()
    if not streamed:
        assert b"content-length" in older[0].lower() and statuses(answers[0]) == [200]
        return
    assert b"connection: close" in older[0].lower() and b"transfer-encoding" in newer[0].lower()
    assert older[2].startswith(b"data: {") and older[2].endswith(b"data: [DONE]\n\n")
    events = older[2].count(b"data: ")
    assert events == newer[2].count(b"data: ") and b"\r\n" not in older[2]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_is_told_from_one_that_half_closes(server, streamed):
    """Also where nothing is written for long: the request waits for ever."""
    fields = {"model": MODEL, "prompt": "x", "stream": streamed, "cache_salt": "hang"}
    body = json.dumps(fields).encode()
    post = head("Host: x", KIND, f"Content-Length: {len(body)}") + body
    for others in (0, 2):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(post * (1 + others))
            eventually(lambda: server.metric("tpdet_requests_waiting") == 1)
        eventually(lambda: server.metric("tpdet_requests_waiting") == 0)
    assert running(server) == 0


@pytest.mark.parametrize(
    "lines",
    [
        (), ("Host: x", "Host: x"), ("Host: x", "Host: y"), ("Host: x", KIND, KIND),
    ],
)  # fmt: skip
def test_a_header_that_must_stand_once_does(server, lines):
    assert statuses(server.raw(head(*lines, first="GET /health HTTP/1.1"))) == [400]
    old = head(*lines, first="GET /health HTTP/1.0")
    assert statuses(server.raw(old)) == ([200] if not lines else [400])
    assert statuses(
        server.raw(head("Host:", "Connection: close", first="GET /health HTTP/1.1"))
    ) == [200]


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "identity, chunked"])
def test_a_body_may_only_be_chunked(server, coding):
    data = head("Host: x", KIND, f"Transfer-Encoding: {coding}", "Connection: close")
    (status,) = statuses(server.raw(data + CHUNKED + b"\r\n"))
    assert status in (400, 415)
