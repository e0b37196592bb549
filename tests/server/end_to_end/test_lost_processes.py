"""Processes that fail: every stream ends with an error, the server with its exit code."""

import concurrent.futures
import contextlib
import json
import os
import signal
import time

import pytest

from tests.lib.server.harness import eventually
from tests.server.streams import SLOW, decided, fatal_line, in_background, running, stream

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_an_engine_that_hangs_ends_every_stream_and_the_server(start_server):
    """Alone it has no peer that would miss it: the HTTP process does, and kills it."""
    server = start_server("--step-timeout", "1")
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
def test_a_stalled_or_full_log_delays_no_answer_and_no_exit(start_server, log, end):
    if log == "stalled pipe":
        reader, writer = full_pipe()
    else:
        reader, writer = os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    server = start_server(stderr=writer)
    assert [server.complete().status_code for _ in range(50)] == [200] * 50
    if end == "drain":
        assert server.stop() == 0
    else:
        assert server.complete(cache_salt="die").status_code == 503
        assert server.process.wait(30) == 75
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("fault", "code"), [("die", "engine_dead"), ("damage", "integrity_error")])
def test_an_engine_that_fails_ends_every_stream_with_an_error(start_server, fault, code):
    server = start_server()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = in_background(pool, server, 4, **SLOW)
        whole = pool.submit(server.complete, **SLOW)
        eventually(lambda: running(server) == 5)
        began = time.monotonic()
        pool.submit(lambda: server.complete(cache_salt=fault))
        for future in futures:
            events = future.result()
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
            assert "data: [DONE]" not in events
        assert whole.result().status_code == (503 if fault == "die" else 500)
        assert "secret" not in whole.result().text
    assert server.process.wait(10) == 75
    assert time.monotonic() - began < 9  # by themselves they end after 10
    assert fatal_line(server)["event"] == "fatal" and fatal_line(server)["exit"] == 75
    assert not server.child.is_running()


def test_rank_0_killed_ends_streams_with_an_error_and_the_http_process(start_server):
    server = start_server()
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
        eventually(lambda: not server.child.is_running(), 9)
        assert time.monotonic() - began < 9  # by themselves they end after 10


def test_the_http_process_killed_is_75(start_server):
    server = start_server()
    server.child.kill()
    assert server.process.wait(10) == 75 and decided(server)["exit"] == 75


def test_the_http_process_stopped_is_75_after_the_step_timeout(start_server):
    server = start_server("--step-timeout", "2")
    server.child.suspend()
    began = time.monotonic()
    assert server.process.wait(15) == 75
    assert time.monotonic() - began > 1
    eventually(lambda: not server.child.is_running())
