"""Bare `tpdet verify`: short, with a plan and what is left, and without litter."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tpdet.cli import command_parser
from tpdet.verify.arguments import MATRIX, SHORT, fill_matrix
from tpdet.verify.progress import Progress, duration

COMMAND = [sys.executable, "-m", "tpdet", "verify"]


@pytest.mark.parametrize(
    ("arguments", "short"),
    [
        ((), True),
        (("--control", "--device", "cpu", "--seed", "3"), True),
        (("--all",), False),
        (("models/demo",), False),
        (("--tp", "1,2"), False),
    ],
)
def test_without_arguments_the_matrix_is_the_short_one(arguments, short):
    options = command_parser().parse_args(["verify", *arguments])
    assert fill_matrix(options) is short
    expected = (SHORT if short else MATRIX) | ({"tp": "1,2"} if "--tp" in arguments else {})
    assert {name: getattr(options, name) for name in MATRIX} == expected


def test_progress_says_the_plan_and_then_what_is_left():
    now = 100.0
    console = Console(record=True, width=100, file=io.StringIO())
    progress = Progress(console, 12, guess=8.0, clock=lambda: now)
    progress.plan()
    for name in "abc":
        progress.begin(name)
        now += 5.0
        progress.end()
    progress.begin("d")
    assert console.export_text().splitlines() == [
        "12 runs, about 96 s",
        "1 of 12: a",
        "2 of 12: b, about 55 s left",
        "3 of 12: c, about 50 s left",
        "4 of 12: d, about 45 s left",
    ]
    assert [duration(s) for s in (7.4, 99, 101, 600)] == ["7 s", "99 s", "2 min", "10 min"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGHUP]
)
def test_a_stopped_verification_leaves_no_folder(tmp_path, number):
    """`server/commands/test_real_starts.py` ends those of a named matrix."""
    process = subprocess.Popen(COMMAND, env=os.environ | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("tpdet-verify-*")):  # a world runs, or is about to
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert any(tmp_path.glob("tpdet-models-*"))
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.alone
def test_it_ends_within_two_minutes_and_shows_one_table():
    began = time.monotonic()
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=280)
    seconds = time.monotonic() - began
    print(f"bare tpdet verify: {seconds:.0f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"4 runs, about \d+ s", lines[0])
    assert re.fullmatch(r"3 of 4: tiny-qwen3, TP 1, fresh, about \d+ s left", lines[3])
    assert lines[-1] == "40 relations, all equal"
    assert done.stdout.count("circumstance") == 1 and "/tmp" not in done.stdout
    assert seconds < 120
