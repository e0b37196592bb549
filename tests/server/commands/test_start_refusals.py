"""Servers that refuse to start: their exit codes, and nobody is left."""

import subprocess
import sys

import pytest

from tests.lib.server.harness import Server
from tests.lib.tree import ROOT
from tests.server.streams import fatal_line

pytestmark = pytest.mark.long


def test_a_taken_port_is_71_and_leaves_nobody(start_server):
    server = start_server()
    other = start_server("--port", str(server.port), wait=False)
    assert other.process.wait(20) == 71
    assert "another --port" in fatal_line(other)["message"]
    assert not (other.run / "ready.json").exists()
    assert server.complete().status_code == 200


def test_a_run_directory_in_use_is_71(start_server, tmp_path):
    server = start_server()
    command = [sys.executable, "-m", "tests.lib.server.fake_rank", "--model", "x", "--port", "0"]
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
