"""Log lines: the ones operators know, no secrets, and no waiting for whoever reads them."""

import logging
import os
import re
import time

import pytest

from tests.server.harness import Server, eventually
from tpdet.server.log import LineFormatter, Log, log_access
from tpdet.server.metrics import Metrics
from tpdet.server.protocol import Status
from tpdet.server.statistics_line import StatisticsLine


def record(text: str, name: str = "tpdet.server", error: BaseException | None = None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord(name, logging.INFO, "file", 1, text, (), info)


def test_an_exception_is_shown_without_its_message():
    try:
        raise KeyError("part of a prompt")
    except KeyError as error:
        text = LineFormatter().format(record("request 1 failed", error=error))
    assert text.splitlines()[0].endswith("[tpdet.server] request 1 failed")
    assert text.endswith("KeyError") and "test_log.py" in text and "prompt" not in text


def test_a_pipe_that_nobody_reads_holds_nobody_up():
    reader, writer = os.pipe()
    log = Log(writer, lines=100)
    began = time.monotonic()
    for number in range(5000):
        log.handle(record(f"{number} " + "x" * 200))
    assert time.monotonic() - began < 2.0 and log.dropped > 3000
    found = b""
    while b"were dropped" not in found:
        found += os.read(reader, 65536)
        if not found.endswith(b"\n"):
            continue
        log.handle(record("more"))
    assert b" 0 xxx" in found
    os.close(reader)
    before = log.dropped
    log.handle(record("to nobody"))
    eventually(lambda: log.dropped > before)


@pytest.mark.parametrize(
    ("path", "shown"),
    [("/v1/models", "/v1/models"), ("/a\nb\x1b[2J", r"/a\nb\x1b[2J"), ("/" + "é" * 500, None)],
)
def test_a_path_cannot_write_lines_of_its_own(caplog, path, shown):
    scope = {"client": ("127.0.0.1", 5), "method": "GET", "path": path, "http_version": "1.1"}
    with caplog.at_level(logging.INFO, "tpdet.access"):
        log_access(scope, 404)
    (text,) = caplog.messages
    assert "\n" not in text and text.isascii() and len(text) < 1000
    if shown:
        assert text == f'127.0.0.1:5 - "GET {shown} HTTP/1.1" 404 Not Found'


def test_the_statistics_line_speaks_while_something_runs_and_once_more():
    status = Status("accepting", 0, 0, {"pages_used": 1.0, "pages_free": 3.0})
    metrics = Metrics("m", lambda: status)
    line = StatisticsLine(metrics, lambda: status)
    assert line.line() is None
    metrics.generation_tokens.count(1000)
    text = line.line()
    assert text is not None and text.startswith("Engine 000: Avg prompt throughput: 0.0 tokens/s, ")
    assert "Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 25.0%" in text
    still = line.line()
    assert still is not None and "Avg generation throughput: 0.0 tokens/s" in still
    assert line.line() is None


def test_requests_and_statistics_are_logged_unless_switched_off(tmp_path):
    access = re.compile(r'^INFO:     127\.0\.0\.1:\d+ - "(\w+ \S+) HTTP/1\.1" (\d+ .*)$', re.M)
    folders = [tmp_path / name for name in ("on", "off")]
    for folder in folders:
        folder.mkdir()
    silent = ("--disable-uvicorn-access-log", "--disable-log-stats")
    for folder, flags in zip(folders, ((), silent), strict=True):
        server = Server(folder, *flags, limits={"STATISTICS_SECONDS": 0.1})
        server.complete(prompt="secret", stream=True)
        server.complete(nonsense=1)
        server.http.get("/nowhere?key=secret")
        time.sleep(0.3)
        assert server.stop() == 0
    text = (folders[0] / "log").read_text()
    assert access.findall(text) == [
        ("POST /v1/completions", "200 OK"),
        ("POST /v1/completions", "400 Bad Request"),
        ("GET /nowhere", "404 Not Found"),
    ]
    assert re.search(r"^INFO [\d-]+ [\d:]+ \[tpdet\.server\] Engine 000: Avg prompt", text, re.M)
    assert "secret" not in text
    quiet = (folders[1] / "log").read_text()
    assert not access.findall(quiet) and "Engine 000" not in quiet
