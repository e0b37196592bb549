"""What arrives of requests is bounded for all connections together."""

import contextlib
import json
import socket
import time

import pytest

from tests.lib.server.harness import MODEL, Server, eventually, read_all, request_bytes
from tpdet.requests.body.limits import MAX_HELD_BYTES
from tpdet.server.front import memory
from tpdet.server.http1.held_bytes import HeldBytes

PATH = "/v1/completions"
KIND = "Content-Type: application/json"
SLACK = 48 << 20


def test_the_largest_that_has_not_come_whole_makes_room():
    budget, refused = HeldBytes(100), []
    a, b, c = (budget.hold(lambda name=name: refused.append(name)) for name in "abc")
    assert a.add(50) and b.add(40) and c.add(10)
    assert c.add(1) and refused == ["a"] and budget.total == 51
    assert b.add(49)
    assert not b.add(1)  # it is the largest itself
    b.release()
    c.add(60)
    c.arrived()
    assert not budget.hold(lambda: None).add(40)  # what has come whole is worked on
    for hold in (a, b, c):
        hold.release()
        hold.release()
    assert a.add(1000) and budget.total == 40


@pytest.fixture
def server(tmp_path):
    found = Server(tmp_path)
    yield found
    assert found.stop() == 0, found.log.read_text()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def unfinished(stack, server: Server, count: int, size: int) -> list[socket.socket]:
    """Connections that announce a body and send all of it but the end."""
    head = request_bytes(PATH, b"", KIND, f"Content-Length: {size}")
    found = [stack.enter_context(connect(server)) for _ in range(count)]
    for connection in found:
        with contextlib.suppress(ConnectionError):  # refused while it was sending
            connection.sendall(head + b"{" * (size - 1))
    return found


def answer_of(connection: socket.socket) -> bytes:
    try:
        return read_all(connection)
    except ConnectionError:
        return b""


def test_unfinished_bodies_cannot_grow_the_process_past_the_bound(server):
    before = server.child.memory_info().rss
    size, most = 10 << 20, 0
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(8):
            connections += unfinished(stack, server, 5, size)
            most = max(most, server.child.memory_info().rss - before)
            assert server.complete().status_code == 200  # whoever asks for little is served
        kept = MAX_HELD_BYTES // size
        refused = []
        for connection in connections:
            connection.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                refused.append(answer_of(connection))
        assert 40 - kept - 2 <= len(refused) <= 40 - kept + 2
        told = [answer for answer in refused if answer]
        assert len(told) > len(refused) // 2  # the others were reset while they were sending
        for answer in told:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "engine_overloaded"
    assert most < MAX_HELD_BYTES + SLACK
    # What they held goes back to the system.
    eventually(lambda: server.child.memory_info().rss - before < SLACK, 6 * memory.SECONDS)
    print(f"40 unfinished bodies of {size >> 20} MiB: {most >> 20:+d} MiB, {len(refused)} refused")
    eventually(lambda: server.complete(prompt="x" * 300_000).status_code == 400)


def test_heads_and_pipelines_count_too(tmp_path):
    limit = 4 << 20
    server = Server(tmp_path, limits={"MAX_HELD_BYTES": limit})
    slow = json.dumps({"model": MODEL, "prompt": "x", "cache_salt": "hang"}).encode()
    post = request_bytes(PATH, slow, KIND, f"Content-Length: {len(slow)}")
    post = post.replace(b"Connection: close\r\n", b"")
    get = request_bytes("/health", b"", *(f"X-{i}: {'v' * 1400}" for i in range(10)), method="GET")
    with contextlib.ExitStack() as stack:
        for _ in range(40):  # each waits behind an answer that never comes
            connection = stack.enter_context(connect(server))
            connection.sendall(post + get.replace(b"Connection: close\r\n", b"") * 15)
        time.sleep(0.5)
        before = server.child.memory_info().rss
        for _ in range(40):
            connection = stack.enter_context(connect(server))
            with contextlib.suppress(ConnectionError):
                connection.sendall(post + get.replace(b"Connection: close\r\n", b"") * 15)
        assert server.child.memory_info().rss - before < 4 * limit
        found = server.http.get("/health")
        assert found.status_code in (200, 503)
    eventually(lambda: server.complete().status_code == 200)
    assert server.stop() == 0
