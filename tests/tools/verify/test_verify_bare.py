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
from tpdet.tools.verify import progress as progress_module
from tpdet.tools.verify.arguments import SHORT, WHOLE, fill_matrix
from tpdet.tools.verify.progress import CircumstancesDone, RunProgress, duration

pytestmark = pytest.mark.long

COMMAND = [sys.executable, "-m", "tpdet", "verify"]


@pytest.mark.parametrize(
    ("arguments", "values", "changed"),
    [
        ((), SHORT, {}),
        (("--control", "--device", "cpu", "--seed", "3"), SHORT, {}),
        (("models/demo",), SHORT, {}),
        (("--tp", "1,4", "--launcher", "slurm"), SHORT, {"tp": "1,4", "launcher": "slurm"}),
        (("--all",), WHOLE, {}),
        (("models/demo", "--all", "--relations", "alone"), WHOLE, {"relations": "alone"}),
    ],
)
def test_a_flag_narrows_and_all_widens(arguments, values, changed):
    options = command_parser().parse_args(["verify", *arguments])
    fill_matrix(options)
    assert {name: getattr(options, name) for name in WHOLE} == values | changed


def test_progress_says_the_plan_and_then_what_is_left():
    now = 100.0
    console = Console(record=True, width=100, file=io.StringIO())
    progress = RunProgress(console, 12, expected=8.0, clock=lambda: now)
    progress.plan()
    for name in "abc":
        number = progress.begin(name)
        now += 5.0
        progress.end(number)
    number = progress.begin("d")
    for done in range(1, 5):
        now += 5.0
        progress.inside(number, done, 8)
    assert console.export_text().splitlines() == [
        "12 runs, about 96 s",
        "1 of 12: a",
        "2 of 12: b, about 55 s left",
        "3 of 12: c, about 50 s left",
        "4 of 12: d, about 45 s left",
        "4 of 12: 2 of 8 circumstances, about 67 s left",
        "4 of 12: 4 of 8 circumstances, about 85 s left",
    ]
    assert [duration(s) for s in (7.4, 99, 101, 600)] == ["7 s", "99 s", "2 min", "10 min"]


def test_a_run_tells_how_far_it_is_by_a_file_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "QUIET_SECONDS", 0.0)
    console = Console(record=True, width=100, file=io.StringIO())
    progress = RunProgress(console, 1)
    with progress.watched("a model", tmp_path):
        done = CircumstancesDone(tmp_path, 3)
        done.one_more()
        deadline = time.monotonic() + 60
        while "1 of 3" not in console.export_text(clear=False):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "1 of 1: 1 of 3 circumstances, about" in console.export_text()


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
