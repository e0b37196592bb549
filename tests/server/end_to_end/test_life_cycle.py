"""Clients that go, queues that fill, engines that die, servers that stop."""

import concurrent.futures
import http.client
import json
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest

from tests.lib.server.harness import MODEL, eventually, request_bytes
from tests.server.streams import PATH, SLOW, decided, fatal_line, in_background, running

pytestmark = pytest.mark.long


@pytest.mark.alone
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_is_dropped(server, streamed):
    body = {"model": MODEL, "prompt": "x", "stream": streamed, "n": 2} | SLOW
    data = json.dumps(body).encode()
    head = request_bytes(
        PATH, data, "Content-Type: application/json", f"Content-Length: {len(data)}"
    )
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head)
    eventually(lambda: running(server) == 1)
    connection.close()
    gone = time.monotonic()
    eventually(lambda: running(server) == 0)
    assert time.monotonic() - gone < 1.5


def test_a_stop_string_ends_the_choice_in_the_engine_too(server):
    text = server.complete(max_tokens=3, seed=4, ignore_eos=True).json()["choices"][0]["text"]
    found = server.complete(seed=4, stop=text[1:3], **SLOW)
    assert found.json()["choices"][0]["text"] == text[0]
    eventually(lambda: running(server) == 0, 5.0)  # of 10


@pytest.mark.alone
def test_a_full_queue_refuses_within_200_ms_and_serves_the_rest(start_server):
    server = start_server("--max-queue", "3", "--max-num-seqs", "2")
    before = server.canary()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        futures = in_background(pool, server, 2, cache_salt="slow=0.3", max_tokens=8)

        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2})

        def timed(_: int) -> tuple[int, float, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            began = time.monotonic()
            connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            found = connection.getresponse()
            answer = json.loads(found.read())
            if found.status == 503:
                assert found.getheader("retry-after")
            code = answer.get("error", {}).get("code", "")
            return found.status, time.monotonic() - began, code

        results = list(pool.map(timed, range(20)))
        assert [len(future.result()) for future in futures] == [9, 9]
    refused = [(seconds, code) for status, seconds, code in results if status == 503]
    assert len(refused) >= 12 and {code for _, code in refused} == {"engine_overloaded"}
    assert sum(status == 200 for status, _, _ in results) == 20 - len(refused) > 0
    assert max(seconds for seconds, _ in refused) < 0.2
    assert server.canary() == before
    # A batch is admitted whole or not at all: of one that never fits nobody is told to try again.
    found = server.complete(prompt=["x"] * 4)
    assert found.status_code == 400 and "--max-queue" in found.text
    assert server.complete(prompt=["x"] * 3).status_code == 200
    assert server.stop() == 0


def test_a_slow_reader_is_cut_and_slows_nobody(start_server):
    server = start_server("--max-model-len", "4096", limits={"SLOW_READER_TIMEOUT": 0.5})
    body = {"model": MODEL, "prompt": "x", "stream": True, "n": 16, "logprobs": 16}
    data = json.dumps(body | {"max_tokens": 4000, "ignore_eos": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"Content-Length: {len(data)}"
    connection.sendall(request_bytes(PATH, data, "Content-Type: application/json", head))
    eventually(lambda: running(server) == 1)
    eventually(lambda: running(server) == 0, 15)
    assert server.complete().status_code == 200
    connection.close()


def test_a_reader_that_falls_behind_for_a_while_misses_nothing(start_server):
    """Events wait for it behind those that were written as they came; none is lost or doubled."""
    server = start_server("--max-model-len", "4096")
    body = {"model": MODEL, "prompt": "x", "n": 8, "logprobs": 16, "seed": 3, "max_tokens": 400}
    body |= {"ignore_eos": True}
    whole = [choice["text"] for choice in server.complete(**body).json()["choices"]]
    data = json.dumps(body | {"stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"Content-Length: {len(data)}"
    connection.sendall(request_bytes(PATH, data, "Content-Type: application/json", head))
    eventually(lambda: server.metric("tpdet_generation_tokens_total") == 2 * 8 * 400, 20)
    assert running(server) == 0
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    *events, last = answer.read().decode().split("\n\n")[:-1]
    assert last == "data: [DONE]"
    found = [""] * 8
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == whole


def test_sigterm_drains_running_requests_and_refuses_new_ones(start_server):
    server = start_server()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 3, cache_salt="slow=0.1", max_tokens=20)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503)
        found = server.complete()
        assert found.status_code == 503 and found.json()["error"]["code"] == "draining"
        assert server.http.get("/health").status_code == 200
        for number in (signal.SIGTERM, signal.SIGINT):  # a second stop signal changes nothing
            server.process.send_signal(number)
            time.sleep(0.2)
        assert all(future.result()[-1] == "data: [DONE]" for future in futures)
    assert server.process.wait(10) == 0
    assert decided(server) == {"exit": 0, "code": "drained", "rank": 0, "message": ""}
    assert not server.child.is_running()


def test_past_the_drain_timeout_streams_end_with_an_error_and_the_exit_is_143(start_server):
    server = start_server("--drain-timeout", "0.5")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 2, **SLOW)
        server.process.send_signal(signal.SIGTERM)
        for future in futures:
            last = json.loads(future.result()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "draining"
    assert server.process.wait(10) == 143 and decided(server)["exit"] == 143
    assert fatal_line(server)["exit"] == 143


def test_secrets_and_sockets_are_private_and_removed_at_the_end(start_server):
    given = "ab" * 32
    server = start_server(environment={"TPDET_RUN_SECRET": given})
    for name in ("secret", "engine.sock"):
        assert (server.run / name).stat().st_mode & 0o777 == 0o600
    secret = (server.run / "secret").read_text().strip()
    assert given in psutil.Process(server.process.pid).environ().values()
    assert given not in repr(server.child.environ())
    for process in (psutil.Process(server.process.pid), server.child):
        assert secret not in repr((process.cmdline(), process.environ()))
    for word in (secret, given):
        assert word not in server.http.get("/metrics").text
    assert server.stop() == 0
    assert not {"secret", "engine.sock"} & {path.name for path in server.run.iterdir()}
    assert secret not in server.log.read_text() and given not in server.log.read_text()


def test_stop_signals_are_rank_0s_business(server):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        server.child.send_signal(number)
    assert server.complete().status_code == 200


def test_a_large_body_does_not_hold_up_health_or_streams(server):
    body = json.dumps({"model": MODEL, "prompt": "word " * 200_000, "truncate_prompt_tokens": 4})
    taken = []
    done = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                taken.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    headers = {"content-type": "application/json"}
    found = server.http.post(PATH, content=body, headers=headers, timeout=120)
    whole = time.monotonic() - began
    done.set()
    watcher.join()
    assert found.status_code == 200, found.text
    assert sorted(taken)[len(taken) // 2] < whole / 5
