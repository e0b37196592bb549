"""Log lines: the ones operators know, no secrets, and no waiting for whoever reads them."""

import logging
import os
import re
import sys
import time

import pytest

from tests.lib.server.harness import Server, eventually
from tpdet.checkpoint.load_progress import LoadProgress
from tpdet.launch.life.log_lines import LineFormatter, Log
from tpdet.launch.life.waiting import Waiting
from tpdet.server.front.load_lines import StatisticsLine
from tpdet.server.front.log import log_access
from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Status

pytestmark = pytest.mark.long


def record(text: str, name: str = "tpdet.server", error: BaseException | None = None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord(name, logging.INFO, "file", 1, text, (), info)


def test_an_exception_is_shown_without_its_message():
    try:
        raise KeyError("part of a prompt")
    except KeyError as error:
        text = LineFormatter("http").format(record("request 1 failed", error=error))
    assert text.splitlines()[0].endswith(" INFO    [http] request 1 failed")
    assert text.endswith("KeyError") and "test_log.py" in text and "prompt" not in text


def test_what_a_client_named_begins_no_line():
    text = LineFormatter("http").format(record("weights a\nb\x1b[31m\u2028é in place"))
    assert text.endswith(r"weights a\nb\x1b[31m\u2028é in place")


def test_a_pipe_that_nobody_reads_holds_nobody_up():
    reader, writer = os.pipe()
    log = Log(writer, "http", lines=100)
    began = time.monotonic()
    for number in range(5000):
        log.handle(record(f"{number} " + "x" * 200))
    assert time.monotonic() - began < 20.0 and log.dropped > 3000
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
        log_access(scope, "id", 404, 1.25)
    (text,) = caplog.messages
    assert "\n" not in text and text.isascii() and len(text) < 1000
    if shown:
        end = "status=404 latency_ms=1.2 request=id client=127.0.0.1:5"
        assert text == f"GET {shown} {end}"


def test_the_statistics_line_speaks_while_something_runs_and_once_more():
    status = Status("accepting", 0, 0, {"pages_used": 1.0, "pages_free": 3.0})
    metrics = Metrics("m", lambda: status)
    line = StatisticsLine(metrics, lambda: status)
    assert line.line() is None
    metrics.tally.add("generation_tokens", 1000)
    text = line.line()
    assert text is not None and text.startswith("Avg prompt throughput: 0.0 tokens/s, ")
    assert "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 25.0%" in text
    assert "Draft" not in text
    status.counters.update(draft_tokens=8.0, accepted_draft_tokens=6.0)
    still = line.line()
    assert still is not None and "Avg generation throughput: 0.0 tokens/s" in still
    assert still.endswith("Draft acceptance rate: 75.0%")
    assert line.line() is None


LINE = (
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING|ERROR) +\[(rank \d+|http|serve)\] (.*)$"
)
ACCESS = re.compile(
    r"^(?P<what>\w+ \S+) status=(?P<status>\d+)"
    r"( prompt_tokens=(?P<prompt>\d+) completion_tokens=(?P<completion>\d+))?"
    r" latency_ms=(?P<latency>[\d.]+) request=(?P<id>[0-9a-f]{32}) client=127\.0\.0\.1:\d+$"
)


def lines_of(text):
    """(level, who, message) of each line; a line of another format is an error."""
    found = [(line, re.match(LINE, line)) for line in text.splitlines()]
    assert all(match for _, match in found), [line for line, match in found if not match]
    return [match.groups() for _, match in found]


def test_requests_and_statistics_are_logged_unless_switched_off(tmp_path):
    folders = [tmp_path / name for name in ("on", "off")]
    for folder in folders:
        folder.mkdir()
    silent = ("--disable-uvicorn-access-log", "--disable-log-stats")
    for folder, flags in zip(folders, ((), silent), strict=True):
        server = Server(folder, *flags, limits={"STATISTICS_SECONDS": 0.1})
        server.complete(prompt="secret", stream=True)
        whole = server.complete(prompt="secret", max_tokens=9, cache_salt="slow=0.02")
        server.complete(nonsense=1)
        server.http.get("/nowhere?key=secret")
        if flags:
            time.sleep(0.3)
        else:
            eventually(lambda server=server: "Avg prompt throughput: " in server.log.read_text())
        assert server.stop() == 0
    text = (folders[0] / "log").read_text()
    lines = lines_of(text)
    http = [message for _, who, message in lines if who == "http"]
    access = [found.groupdict() for found in map(ACCESS.match, http) if found]
    assert [(line["what"], line["status"], line["completion"]) for line in access] == [
        ("POST /v1/completions", "200", "4"),
        ("POST /v1/completions", "200", "9"),
        ("POST /v1/completions", "400", None),
        ("GET /nowhere", "404", None),
    ]
    assert access[1]["prompt"] == str(whole.json()["usage"]["prompt_tokens"])
    assert float(access[1]["latency"]) >= 9 * 20, "at the end of the answer"
    assert any(message.startswith("Avg prompt throughput: ") for message in http)
    assert "secret" not in text
    quiet = [message for _, _, message in lines_of((folders[1] / "log").read_text())]
    assert not any(ACCESS.match(line) or "throughput" in line for line in quiet)


def test_a_request_whose_client_goes_away_has_its_line_too(server):
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "demo",
            "prompt": "hello",
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": "slow=0.02",
        },
    ) as answer:
        request_id = answer.headers["x-request-id"]
        next(answer.iter_lines())
    eventually(lambda: f"request={request_id}" in server.log.read_text())
    line = next(line for line in server.log.read_text().splitlines() if request_id in line)
    assert " INFO " in line and "status=200" in line, "no failure of the server's"
    assert 0 < int(re.search(r"completion_tokens=(\d+)", line).group(1)) < 200


def test_a_start_says_what_it_does_and_a_drain_how_it_went(tmp_path):
    server = Server(tmp_path)
    lines = [message for _, who, message in lines_of(server.log.read_text()) if who == "rank 0"]
    assert lines[0].startswith("starting rank 0 of 1 for ")
    (model,) = (line for line in lines if line.startswith("demo: dtype "))
    for fact in ("tensor-parallel size 1", "context 256", "KV pages", "contract c0c0"):
        assert fact in model
    assert server.ready["system_fingerprint"] in model
    assert lines[-1].startswith(f"demo at {server.url}, run directory ")
    assert server.stop() == 0
    after = [message for _, _, message in lines_of(server.log.read_text())]
    assert after[-1] == "drained and stopped" and not any("draining" in line for line in after)


@pytest.mark.slow
def test_a_start_that_takes_long_has_a_line_every_five_seconds(tmp_path):
    server = Server(tmp_path, slow_start=11)
    lines = [message for _, _, message in lines_of(server.log.read_text())]
    assert server.stop() == 0
    found = [re.sub(r".*: (\d+) s so far", r"\1", line) for line in lines if "so far" in line]
    assert found == ["5", "10"]
    assert any(line.startswith("starting rank 0 of 1 for ") and "so far" in line for line in lines)


def test_what_is_said_last_is_said_again_while_a_start_takes_long(caplog):
    log = logging.getLogger("tpdet.test")

    def again() -> list[str]:
        return [text for text in caplog.messages if text.startswith("loading: ")]

    with caplog.at_level(logging.INFO, "tpdet"), Waiting(seconds=0.1):
        began = time.monotonic()
        log.info("loading")
        eventually(lambda: len(again()) >= 3)
        log.warning("a warning is nothing that is being done")
        eventually(lambda: len(again()) >= 4)
    most, said = (time.monotonic() - began) / 0.1 + 1, len(again())
    time.sleep(0.2)
    assert 4 <= said <= most and len(again()) <= said + 1
    assert all(re.fullmatch(r"loading: \d+ s so far", text) for text in again())


def test_a_closed_standard_error_shows_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    progress = LoadProgress(2, True)
    progress.step()
    progress.close()


def test_lines_of_loading_come_at_most_every_five_seconds(caplog):
    now = 0.0
    with caplog.at_level(logging.INFO, "tpdet"):
        progress = LoadProgress(40, True, clock=lambda: now)
        for _ in range(40):
            now += 0.5
            progress.step()
        progress.close()
    assert caplog.messages == [
        f"loading weights: {share} %, {read} of 40 tensors"
        for share, read in ((25, 10), (50, 20), (75, 30), (100, 40))
    ]
