"""The proxy passes bytes on as they are and as they come, and adds nothing to either side."""

import asyncio
import json

import pytest

from tpdet.client.address import Address
from tpdet.errors import PeerLostError, RequestError
from tpdet.tools.tape import ids as ids_module
from tpdet.tools.tape.fork import answer_live
from tpdet.tools.tape.ids import IdsTask
from tpdet.tools.tape.proxy import Proxy
from tpdet.tools.tape.tape_file import Binary, Turn, bytes_of
from tpdet.tools.tape.upstream import post_json

FIRST, SECOND = b'data: {"a":1}\n\n', b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nX-Of-Server: 1\r\n"
STREAM = HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SECRET = b"Bearer sk-secret"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream:
    """A server whose answers are bytes that a test writes."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []
        self.left = asyncio.Event()

    async def __call__(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [
            line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        self.asked.append((head, body))
        await self.answer(reader, writer, self)
        writer.close()


def request(body=b"{}", path=b"/v1/completions", more=b""):
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\nX-Of-Client: 2\r\n%b"
        b"Content-Length: %d\r\n\r\n%b" % (path, SECRET, more, len(body), body)
    )


def run(test, answer, replay=answer_live):
    """Run test(upstream, connect, proxy); the turns that were recorded."""
    turns = []

    async def whole():
        upstream = Upstream(answer)
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        upstream.address = address = Address(
            "127.0.0.1", server.sockets[0].getsockname()[1], False, ""
        )
        proxy = Proxy(address, replay, turns.append)
        door = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        port = door.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(
                test(upstream, lambda: asyncio.open_connection("127.0.0.1", port), proxy), 30
            )
        finally:
            door.close()
            server.close()
            await proxy.close(5.0)

    asyncio.run(whole())
    return turns


def test_a_stream_is_passed_on_event_by_event_byte_for_byte():
    seen = asyncio.Event()

    async def answer(reader, writer, upstream):
        writer.write(STREAM + chunk(FIRST))
        await seen.wait()  # the client has the first event before there is a second
        writer.write(chunk(SECOND) + b"0\r\n\r\n")
        await writer.drain()

    async def test(upstream, connect, proxy):
        reader, writer = await connect()
        body = b'{"b" : 1.0, "a": "\xc3\xa9"}\n'
        writer.write(request(body, b"/v1/completions?beta=true"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"x-of-server: 1" in head.lower()
        assert await reader.readuntil(FIRST + b"\r\n") == chunk(FIRST)
        seen.set()
        assert await reader.readuntil(b"0\r\n\r\n") == chunk(SECOND) + b"0\r\n\r\n"
        ((asked, sent),) = upstream.asked
        assert sent == body and asked.startswith(b"POST /v1/completions?beta=true HTTP/1.1\r\n")
        assert SECRET in asked and b"x-of-client: 2" in asked.lower()
        writer.close()

    (turn,) = run(test, answer)
    assert (turn.turn, turn.status, turn.ended, turn.event_stream) == (1, 200, "whole", True)
    assert bytes_of(turn.answer) == FIRST + SECOND
    assert "secret" not in repr(turn) and "Of-" not in repr(turn)


def test_any_bytes_pass_and_a_connection_serves_one_request_after_another():
    data = bytes(range(256))

    async def answer(reader, writer, upstream):
        status = b"503 Busy" if len(upstream.asked) == 2 else b"200 OK"
        writer.write(
            b"HTTP/1.1 %b\r\nContent-Length: 256\r\nRetry-After: 1\r\n\r\n" % status + data
        )
        await writer.drain()

    async def test(upstream, connect, proxy):
        reader, writer = await connect()
        writer.write(request(data) + request(b"not JSON"))  # both at once
        for status in (b"200", b"503"):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status and b"retry-after: 1" in head.lower()
            assert await reader.readexactly(256) == data
        writer.close()

    first, second = run(test, answer)
    assert first.request == first.answer == Binary(data) and not first.is_answer
    assert (second.turn, second.status, second.request) == (2, 503, "not JSON")


def test_a_client_that_leaves_stops_the_answer_and_its_turn_says_so():
    async def answer(reader, writer, upstream):
        writer.write(STREAM + chunk(FIRST))
        assert await reader.read() == b""  # the proxy has left too
        upstream.left.set()

    async def test(upstream, connect, proxy):
        reader, writer = await connect()
        writer.write(request())
        await reader.readuntil(FIRST)
        writer.close()
        await upstream.left.wait()

    (turn,) = run(test, answer)
    assert (turn.ended, bytes_of(turn.answer)) == ("client_left", FIRST) and not turn.is_answer


def test_a_server_that_is_lost_is_lost_for_the_client_too():
    async def answer(reader, writer, upstream):
        if len(upstream.asked) == 1:
            writer.write(STREAM + chunk(FIRST))
            await writer.drain()

    async def test(upstream, connect, proxy):
        for begun in (True, False):
            reader, writer = await connect()
            writer.write(request())
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readuntil(b"0\r\n\r\n")
            assert len(upstream.asked) == (1 if begun else 2)
            writer.close()

    cut, silent = run(test, answer)
    assert (cut.ended, cut.status, bytes_of(cut.answer)) == ("server_lost", 200, FIRST)
    assert (silent.ended, silent.status, silent.answer) == ("server_lost", None, "")


def test_recorded_answers_end_as_they_ended():
    left = Turn(
        turn=1,
        method="POST",
        path="/",
        request="{}",
        status=200,
        event_stream=True,
        answer=FIRST.decode(),
        ended="client_left",
    )
    replies = {1: left, 2: Turn(turn=2, method="POST", path="/", request="{}", ended="server_lost")}

    async def test(upstream, connect, proxy):
        reader, writer = await connect()
        writer.write(request())
        await reader.readuntil(FIRST)  # and no end: the client leaves again
        writer.close()
        reader, writer = await connect()
        writer.write(request())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        assert not upstream.asked
        writer.close()

    first, second = run(test, None, lambda turn: replies[turn.turn])
    assert (first.ended, second.ended, second.status) == ("client_left", "server_lost", None)


def test_what_is_no_http_gets_no_answer_and_counts_as_no_turn():
    async def test(upstream, connect, proxy):
        reader, writer = await connect()
        writer.write(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert await reader.read() == b""
        writer.close()

    assert run(test, None) == []


def answered(digest, **more):
    body = {"id": "a", "choices": [{"index": 0, "text": "ab"}], "tpdet": {"replay_digest": digest}}
    return {**body, **more, "tpdet": {"seed": 5, **body["tpdet"]}}


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        (answered("1" * 64), ""),
        (answered("2" * 64), "the server gave another answer when it was asked again"),
        (PeerLostError("no server answers at h:1"), "no server answers at h:1"),
    ],
)
def test_ids_are_those_of_the_answer_whose_digest_the_client_got(monkeypatch, again, reason):
    asked, told = [], []

    async def post(address, path, body, key):
        asked.append((path, body, key))
        if isinstance(again, Exception):
            raise again
        return json.loads(json.dumps(again))

    monkeypatch.setattr(ids_module, "post_json", post)
    turn = Turn(
        turn=3,
        method="POST",
        path="/v1/completions",
        status=200,
        request=json.dumps({"prompt": "x", "stream": False, "tpdet": {"resume": 1}}),
        answer=json.dumps(answered("1" * 64)),
    )

    async def ask():
        task = IdsTask(Address("h", 1, False, ""), "key", None, told.append)
        task.add(turn)
        await task.finish()

    asyncio.run(ask())
    (ids,) = told
    assert ids.turn == 3 and (ids.body == again if not reason else ids.body is None)
    assert ids.reason.startswith(reason)
    body = {"prompt": "x", "seed": 5, "return_token_ids": True}
    guess = {"prediction": {"type": "content", "content": "ab"}}
    assert asked == [("/v1/completions", body | guess, "key")]


def test_a_busy_server_is_asked_again(monkeypatch):
    waits = []

    async def sleep(seconds, result=None):
        waits.append(seconds)

    async def answer(reader, writer, upstream):
        busy = len(upstream.asked) == 1
        status, body = (b"503 Busy", b"{}") if busy else (b"200 OK", b'{"a": 1}')
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    async def test(upstream, connect, proxy):
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await post_json(upstream.address, "/x", {}, "k") == {"a": 1}

    run(test, answer)
    assert waits == [1.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "lower it"}}', r"the server refuses it \(400\): lower it"),
        (b"<html>", r"the server's answer \(400\) is no JSON"),
    ],
)
def test_what_a_server_refuses_is_said_in_its_words(body, words):
    async def answer(reader, writer, upstream):
        head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await writer.drain()

    async def test(upstream, connect, proxy):
        with pytest.raises(RequestError, match=words):
            await post_json(upstream.address, "/x", {}, None)

    run(test, answer)
