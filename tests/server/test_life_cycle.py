"""Clients that go, queues that fill, engines that die, servers that stop."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from tests.server.harness import MODEL, ROOT, Server, eventually, request_bytes

PATH = "/v1/completions"
SLOW = {"cache_salt": "slow=0.05", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def start(tmp_path):
    """Starts servers that may end in any way; nothing of them may be left."""
    started: list[Server] = []

    def make(*flags: str, **settings) -> Server:
        found = Server(tmp_path / str(len(started)), *flags, **settings)
        started.append(found)
        return found

    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    yield make
    for found in started:
        children = (
            psutil.Process(found.process.pid).children() if found.process.poll() is None else []
        )
        found.process.kill()
        found.process.wait()
        for child in [*children, *([found.child] if hasattr(found, "child") else [])]:
            eventually(lambda child=child: not child.is_running() or child.status() == "zombie")


def stream(server: Server, **fields) -> list[str]:
    """The events of one streamed request, to its end."""
    body = {"model": MODEL, "prompt": "x", "stream": True} | fields
    with httpx.stream("POST", server.url + PATH, json=body, timeout=30) as found:
        assert found.status_code == 200, found.read()
        return found.read().decode().split("\n\n")[:-1]


def in_background(pool, server: Server, count: int, **fields) -> list:
    futures = [pool.submit(stream, server, **fields) for _ in range(count)]
    eventually(lambda: running(server) == count)
    return futures


def running(server: Server) -> float:
    return server.metric("tpdet_requests_running")


def fatal_line(server: Server) -> dict:
    return json.loads(server.log.read_text().splitlines()[-1])


def decided(server: Server) -> dict:
    return json.loads((server.run / "exit.json").read_text())


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
    eventually(lambda: running(server) == 0, 1.0)


def test_a_full_queue_refuses_within_200_ms_and_serves_the_rest(start):
    server = start("--max-queue", "3", "--max-num-seqs", "2")
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
    # A batch is admitted whole or not at all.
    assert server.complete(prompt=["x"] * 4).status_code == 503
    assert server.complete(prompt=["x"] * 3).status_code == 200
    assert server.stop() == 0


def test_a_slow_reader_is_cut_and_slows_nobody(start):
    server = start("--max-model-len", "4096", limits={"SLOW_READER_TIMEOUT": 0.5})
    body = {"model": MODEL, "prompt": "x", "stream": True, "n": 16, "logprobs": 20}
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


def test_sigterm_drains_running_requests_and_refuses_new_ones(start):
    server = start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 3, cache_salt="slow=0.1", max_tokens=12)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503)
        found = server.complete()
        assert found.status_code == 503 and found.json()["error"]["code"] == "draining"
        assert server.http.get("/health").status_code == 200
        assert all(future.result()[-1] == "data: [DONE]" for future in futures)
    assert server.process.wait(10) == 0
    assert decided(server) == {"exit": 0, "code": "drained", "rank": 0}
    assert not server.child.is_running()


def test_past_the_drain_timeout_streams_end_with_an_error_and_the_exit_is_143(start):
    server = start("--drain-timeout", "0.5")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 2, **SLOW)
        server.process.send_signal(signal.SIGTERM)
        for future in futures:
            last = json.loads(future.result()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "draining"
    assert server.process.wait(10) == 143 and decided(server)["exit"] == 143
    assert fatal_line(server)["exit"] == 143


def test_a_second_stop_signal_changes_nothing(start):
    server = start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 2, cache_salt="slow=0.1", max_tokens=12)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            server.process.send_signal(number)
            time.sleep(0.2)
        assert all(future.result()[-1] == "data: [DONE]" for future in futures)
    assert server.process.wait(10) == 0


@pytest.mark.slow
def test_an_engine_that_hangs_ends_every_stream_and_the_server(start):
    """Alone it has no peer that would miss it: the HTTP process does, and kills it."""
    server = start("--step-timeout", "1")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.submit(stream, server, cache_salt="slow=60").result()
    assert json.loads(found[-1].removeprefix("data: "))["error"]["type"] == "engine_dead"
    assert server.process.wait(10) == -signal.SIGKILL  # 75 under a supervisor
    assert time.monotonic() - began < 15
    eventually(lambda: not (server.run / "engine.sock").exists())


def full_pipe() -> tuple[int, int]:
    """(reader, writer) of a pipe that takes no more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize(
    ("log", "end"),
    [
        ("stalled pipe", "drain"),
        ("full disk", "die"),
        pytest.param("stalled pipe", "die", marks=pytest.mark.slow),
        pytest.param("full disk", "drain", marks=pytest.mark.slow),
    ],
)
def test_a_log_that_takes_nothing_holds_nobody_up(start, log, end):
    if log == "stalled pipe":
        reader, writer = full_pipe()
    else:
        reader, writer = os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    server = start(stderr=writer)
    assert [server.complete().status_code for _ in range(50)] == [200] * 50
    if end == "drain":
        assert server.stop() == 0
    else:
        assert server.complete(cache_salt="die").status_code == 503
        assert server.process.wait(8) == 75
    os.close(reader)
    os.close(writer)


def test_what_only_a_running_server_needs_is_seen_by_nobody_and_gone_after_it(start):
    given = "ab" * 32
    server = start(environment={"TPDET_RUN_SECRET": given})
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


@pytest.mark.parametrize(("fault", "code"), [("die", "engine_dead"), ("damage", "integrity_error")])
def test_an_engine_that_fails_ends_every_stream_with_an_error(start, fault, code):
    server = start()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = in_background(pool, server, 4, **SLOW)
        whole = pool.submit(server.complete, **SLOW)
        began = time.monotonic()
        eventually(lambda: running(server) == 5)
        pool.submit(lambda: server.complete(cache_salt=fault))
        for future in futures:
            events = future.result()
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
            assert "data: [DONE]" not in events
        assert whole.result().status_code == (503 if fault == "die" else 500)
        assert "secret" not in whole.result().text
    assert server.process.wait(10) == 75
    assert time.monotonic() - began < 5
    assert fatal_line(server)["event"] == "fatal" and fatal_line(server)["exit"] == 75
    assert not server.child.is_running()


def test_rank_0_killed_ends_streams_with_an_error_and_the_http_process(start):
    server = start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = in_background(pool, server, 3, **SLOW)
        whole = pool.submit(server.complete, **SLOW)
        eventually(lambda: running(server) == 4)
        server.process.kill()
        began = time.monotonic()
        for future in futures:
            last = json.loads(future.result()[-1].removeprefix("data: "))
            assert last["error"]["type"] == "engine_dead"
        assert whole.result().status_code == 503 and whole.result().headers["retry-after"]
        eventually(lambda: not server.child.is_running(), 3)
        assert time.monotonic() - began < 3


def test_the_http_process_killed_is_75(start):
    server = start()
    server.child.kill()
    assert server.process.wait(10) == 75 and decided(server)["exit"] == 75


def test_the_http_process_stopped_is_75_after_the_step_timeout(start):
    server = start("--step-timeout", "2")
    server.child.suspend()
    began = time.monotonic()
    assert server.process.wait(15) == 75
    assert 1 < time.monotonic() - began < 8
    eventually(lambda: not server.child.is_running())


def test_stop_signals_are_rank_0s_business(server):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        server.child.send_signal(number)
    assert server.complete().status_code == 200


def test_a_taken_port_is_71_and_leaves_nobody(start):
    server = start()
    other = start("--port", str(server.port), wait=False)
    assert other.process.wait(20) == 71
    assert "another --port" in fatal_line(other)["message"]
    assert not (other.run / "ready.json").exists()
    assert server.complete().status_code == 200


def test_a_run_directory_in_use_is_71(start, tmp_path):
    server = start()
    command = [sys.executable, "-m", "tests.server.fake_rank", "--model", "x", "--port", "0"]
    found = subprocess.run(
        [*command, "--run-dir", str(server.run)], cwd=ROOT, capture_output=True, timeout=30
    )
    assert found.returncode == 71 and b'"event": "fatal"' in found.stderr.splitlines()[-1]
    assert server.complete().status_code == 200


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--no-such-flag"], 2),
        (["--port", "70000"], 2),
        (["--max-num-seqs", "x"], 2),
        (["--host", "0.0.0.0"], 2),
        (["--audit-dir", "x"], 2),
        (["--config", "/nonexistent.toml"], 66),
        (["--api-key-file", "/nonexistent"], 66),
        (["--run-secret-file", "/nonexistent"], 66),
    ],
)
def test_a_refusal_at_start_has_its_exit_code_and_leaves_nobody(tmp_path, flags, code):
    found = Server(tmp_path, *flags, wait=False)
    assert found.process.wait(20) == code
    line = fatal_line(found)
    assert line["event"] == "fatal" and line["exit"] == code
    assert not (found.run / "ready.json").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"TPDET_FAULTS": "rank=0,step=1,action=kill"},
        {"TPDET_RUN_SECRET": "not hex"},
    ],
)
def test_an_environment_that_is_refused_at_start(tmp_path, environment):
    found = Server(tmp_path, wait=False, environment=environment)
    assert found.process.wait(20) == 2
    line = fatal_line(found)
    assert line["code"] == "usage" and next(iter(environment)) in line["message"]
    assert "not hex" not in line["message"]


def test_a_large_body_does_not_hold_up_health_or_streams(server):
    body = json.dumps({"model": MODEL, "prompt": "word " * 200_000, "truncate_prompt_tokens": 4})
    slowest = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert httpx.get(server.url + "/health").status_code == 200
            slowest.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = server.http.post(PATH, content=body, headers={"content-type": "application/json"})
    done.set()
    watcher.join()
    assert found.status_code == 200, found.text
    assert sorted(slowest)[len(slowest) // 2] < 0.1
