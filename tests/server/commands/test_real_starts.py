"""`tpdet serve` as a user meets it: one last line, nothing left behind, ends that say so."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.lib.forked import run_forked
from tests.lib.server.harness import eventually
from tpdet.cli import main
from tpdet.launch.life.run_directory import RunDirectory

pytestmark = pytest.mark.long


@pytest.fixture
def serve(tmp_path):
    """Starts `tpdet serve`; its temporary files are in `tmp_path / "tmp"`."""
    (tmp_path / "tmp").mkdir()
    started = []

    def start(model, *flags, stderr=subprocess.PIPE):
        command = [sys.executable, "-m", "tpdet", "serve", str(model), "--port", "0"]
        environ = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen([*command, *map(str, flags)], stderr=stderr, env=environ, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def own_lines(text):
    """Lines that are no log lines."""
    return [line for line in text.splitlines() if " INFO " not in line]


def break_weights(model):
    """NaN in the weights: found by a rank that reads them, not by their header."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def break_tokenizer(model):
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": [1]}}')


@pytest.mark.parametrize(
    ("damage", "tp", "message"),
    [
        (break_weights, 2, "holds NaN"),
        pytest.param(break_tokenizer, 1, "tokenizer.json cannot be read", marks=pytest.mark.slow),
    ],
)
def test_a_late_refusal_is_one_line_for_all_ranks_and_leaves_nothing(
    model, tmp_path, damage, tp, message
):
    damage(model)
    (temporary := tmp_path / "tmp").mkdir()
    ranks = (((),), *[()] * (tp - 1))
    command = ("tpdet", "serve", model, "--port", "0", "--tp", tp)
    done = run_forked(*command, environment={"TMPDIR": str(temporary)}, children=ranks)
    (line,) = own_lines(done.stderr)
    found = json.loads(line)
    assert done.returncode == found["exit"] == 65 and message in found["message"]
    assert list(temporary.iterdir()) == []


def test_a_person_at_a_terminal_reads_the_message_alone(serve, model):
    (model / "config.json").unlink()
    terminal, stderr = pty.openpty()
    process = serve(model, stderr=stderr)
    os.close(stderr)
    assert process.wait(60) == 66
    text = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert text.startswith("tpdet: ") and text.count("\n") == 1 and "does not exist" in text


def test_a_stop_signal_ends_a_start_that_is_stuck(serve, model, tmp_path):
    process = serve(model, "--tp", 2, "--run-dir", tmp_path / "run")
    run = RunDirectory(tmp_path / "run", "")
    eventually(lambda: len(run.records()) == 2 or process.poll(), 60)
    for record in run.records():
        os.kill(record.pid, signal.SIGSTOP)  # as stuck as can be
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - began < 12, errors
    assert own_lines(errors) == []
    assert not {"ready.json", "secret", "store"} & {*os.listdir(run.path)}


def test_a_rank_0_that_waits_for_a_file_ends_at_a_stop_signal(model, tmp_path):
    """Without a supervisor too; a pipe in the place of a library's file that nobody writes to."""
    program = (
        "import os, sys; from tpdet import serve; os.mkfifo(sys.argv[1]); "
        "serve.main(sys.argv[2:], build=lambda *_: open(sys.argv[1]))"
    )
    flags = ["--model", str(model), "--port", "0", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "pipe"), *flags], stderr=subprocess.PIPE
    )
    try:
        run = RunDirectory(tmp_path / "run", "")
        eventually(lambda: run.records() or process.poll(), 60)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and own_lines(errors.decode()) == []
    assert run.exit_decision().exit == 0 and not (run.path / "secret").exists()


def test_stop_says_how_the_server_ended_and_its_files_go(serve, model, tmp_path, capsys):
    process = serve(model, "--run-dir", tmp_path / "run")
    ready = tmp_path / "run" / "ready.json"
    eventually(lambda: ready.exists() or process.poll(), 100)
    assert main(["stop", str(tmp_path / "run")]) == 0
    assert "has ended: drained, exit code 0" in capsys.readouterr().out
    assert process.wait(30) == 0 and not ready.exists()
    assert main(["stop", str(tmp_path / "run")]) == 0
    assert "had ended already: drained, exit code 0" in capsys.readouterr().out
    assert (tmp_path / "run" / "exit.json").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_size_that_does_not_fit_is_refused_before_a_world_starts(model, capsys):
    for command in (
        ["verify", str(model), "--tp", "3"],
        ["bench", "latency", str(model), "--tp", "3"],
    ):
        assert main(command) == 2
        assert "tensor-parallel size 3 does not fit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_verification_of_a_named_matrix_leaves_no_folder(model, tmp_path, number):
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tpdet", "verify", "--tp", "2", "--dtype", "float32"],
        env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        eventually(lambda: any(folder.glob("tpdet-ranks-*/store")) or process.poll(), 100)
        process.send_signal(number)
        process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert [path.name for path in folder.iterdir() if path.name.startswith("tpdet-")] == []
