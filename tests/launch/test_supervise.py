"""`tpdet serve` and `tpdet stop`, with ranks that hold no model: nothing outlives the server."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launch.sleeping_rank import record_as, sleeping, wait_for
from tests.lib.tree import ROOT
from tpdet.errors import (
    NotFoundError,
    PeerLostError,
)
from tpdet.launch.host.processes import living_process, process_status
from tpdet.launch.life.run_directory import ExitDecision, RunDirectory
from tpdet.launch.life.stop import stop
from tpdet.launch.ranks.environment import TORCHRUN_ADDRESS_NAMES, TORCHRUN_NAMES
from tpdet.launch.start.torchrun import torchrun_command

pytestmark = pytest.mark.long

TOLD = (*TORCHRUN_NAMES, *TORCHRUN_ADDRESS_NAMES)
DUMMY = str(Path(__file__).with_name("dummy_rank.py"))
SERVE = (
    "import sys; from pathlib import Path; from tpdet.launch.start.supervise import serve; "
    "sys.exit(serve(int(sys.argv[2]), ['--case', sys.argv[3]], Path(sys.argv[1]), "
    "program=(sys.argv[4],), step_timeout=1.0, drain_timeout=float(sys.argv[5])))"
)


@pytest.fixture
def sleeper():
    with sleeping() as process:
        yield process


class Server:
    """A supervisor with dummy ranks, in processes of its own."""

    def __init__(self, path, ranks, case, drain_timeout):
        self.run = RunDirectory(path, "")
        command = [sys.executable, "-c", SERVE, str(path), str(ranks), case, DUMMY]
        environment = {name: v for name, v in os.environ.items() if name not in TOLD}
        environment["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(
            [*command, str(drain_timeout)], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.seen = []

    def wait_ready(self):
        wait_for(lambda: (self.run.path / "ready.json").exists() or self.process.poll())
        self.seen = self.run.records()

    def end(self):
        """(exit code, last line of standard error)"""
        self.seen = self.seen or self.run.records()
        _, errors = self.process.communicate(timeout=40)
        self.errors = errors
        lines = errors.strip().splitlines()
        return self.process.returncode, lines[-1] if lines else ""

    def living(self):
        records = self.seen or self.run.records()
        return [r for r in records if living_process(r.pid, r.start_time) is not None]


@contextmanager
def server(path, ranks=2, case="serve", drain_timeout=20.0):
    started = Server(path / "run", ranks, case, drain_timeout)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_every_stop_signal_drains_to_0(tmp_path, number):
    with server(tmp_path, ranks=2) as it:
        it.wait_ready()
        it.process.send_signal(number)
        assert it.end()[0] == 0
        assert it.living() == []
        assert it.run.exit_decision() == ExitDecision(0, "drained", 0)
        assert not (it.run.path / "store").exists()


@pytest.mark.parametrize(
    ("case", "code", "name", "rank", "message"),
    [
        ("refuse", 65, "bad_checkpoint", 1, "model.safetensors is truncated"),
        ("crash", 70, "internal_error", 0, "a mistake of ours"),
        ("silent", 75, "engine_dead", 1, "rank 0 (pid"),
    ],
)
def test_the_deciding_ranks_code_and_message_are_passed_on(
    tmp_path, case, code, name, rank, message
):
    with server(tmp_path, case=case) as it:
        exit_code, last_line = it.end()
        assert exit_code == code
        found = json.loads(last_line)
        assert found.pop("message").startswith(message)
        assert found == {"event": "fatal", "code": name, "exit": code, "rank": rank}
        assert it.errors.count('"fatal"') == 1 and "torch" not in it.errors
        assert it.living() == []
        assert (it.run.path / f"clients told by {rank}").exists()


def test_a_stop_signal_reaches_a_watching_thread_while_the_main_thread_waits(tmp_path):
    with server(tmp_path, ranks=2, case="blocked") as it:
        it.wait_ready()
        it.process.send_signal(signal.SIGTERM)
        assert it.end()[0] == 0


def test_ranks_that_end_well_end_the_server_with_0(tmp_path):
    with server(tmp_path, ranks=1, case="done") as it:
        assert it.end()[0] == 0


def test_a_rank_that_fails_before_it_registers_is_an_internal_error(tmp_path):
    with server(tmp_path, ranks=1, case="early") as it:
        exit_code, last_line = it.end()
        assert exit_code == 70 and json.loads(last_line)["code"] == "internal_error"


def test_a_rank_killed_before_it_registers_is_a_lost_rank(tmp_path):
    with server(tmp_path, ranks=2, case="slow start") as it:
        supervisor = psutil.Process(it.process.pid)
        wait_for(lambda: len(supervisor.children()) == 2)
        supervisor.children()[1].kill()
        exit_code, last_line = it.end()
        assert exit_code == 75 and "rank 1 was ended by SIGKILL" in json.loads(last_line)["message"]


def test_a_stop_signal_before_any_rank_registered_ends_everything_with_0(tmp_path):
    with server(tmp_path, ranks=2, case="slow start") as it:
        wait_for(lambda: (it.run.path / "store").exists())
        it.process.send_signal(signal.SIGTERM)
        assert it.end()[0] == 0


def test_ctrl_c_while_ranks_import_is_no_traceback_of_theirs(tmp_path):
    with server(tmp_path, ranks=2, case="slow start") as it:
        wait_for(lambda: (it.run.path / "store").exists())
        time.sleep(0.3)  # until Python turns SIGINT into an exception
        it.process.send_signal(signal.SIGINT)
        assert it.end()[0] == 0
        assert "Traceback" not in it.errors and "KeyboardInterrupt" not in it.errors


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_ends_the_server_with_75_and_nothing_is_left(tmp_path, rank):
    with server(tmp_path, ranks=4, case="child") as it:
        it.wait_ready()
        child = int((it.run.path / "child").read_text())
        os.kill(it.seen[rank].pid, signal.SIGKILL)
        exit_code, last_line = it.end()
        assert exit_code == 75 and json.loads(last_line)["code"] == "engine_dead"
        assert it.living() == [] and process_status(child) is None


def test_a_stopped_rank_ends_the_server_with_75_and_nothing_is_left(tmp_path):
    with server(tmp_path, ranks=2, case="watchful") as it:
        it.wait_ready()
        os.kill(it.seen[1].pid, signal.SIGSTOP)
        assert it.end()[0] == 75
        assert it.living() == [] and it.run.exit_decision().rank == 0


def test_a_rank_stopped_without_peers_is_ended_after_the_step_timeout(tmp_path):
    with server(tmp_path, ranks=1) as it:
        it.wait_ready()
        os.kill(it.seen[0].pid, signal.SIGSTOP)
        assert it.end()[0] == 75
        assert it.living() == []


def test_a_drain_past_its_timeout_is_143(tmp_path):
    with server(tmp_path, case="late") as it:
        it.wait_ready()
        it.process.send_signal(signal.SIGTERM)
        exit_code, last_line = it.end()
        assert exit_code == 143 and json.loads(last_line)["exit"] == 143


def test_a_deaf_rank_0_is_forced_and_a_second_sigterm_changes_nothing(tmp_path):
    with server(tmp_path, case="deaf", drain_timeout=-9.0) as it:  # 1 s with the grace
        it.wait_ready()
        it.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        it.process.send_signal(signal.SIGTERM)
        assert it.process.poll() is None and len(it.living()) == 2
        assert it.end()[0] == 143
        assert it.living() == []


def test_a_killed_supervisor_takes_everything_with_it(tmp_path):
    with server(tmp_path, ranks=2) as it:
        it.wait_ready()
        it.process.kill()
        wait_for(lambda: it.living() == [])


def test_a_second_supervisor_is_refused_and_the_first_serves_on_until_stopped(tmp_path):
    with server(tmp_path, ranks=2) as it:
        it.wait_ready()
        with server(tmp_path) as second:
            assert "in use by process" in second.end()[1]
        assert len(it.living()) == 2
        assert stop(it.run.path, timeout=20.0) == 0
        assert it.end()[0] == 0
        assert stop(it.run.path) == 0  # again: the code it ended with


def test_stop_drains_under_bare_torchrun(tmp_path):
    run = RunDirectory(tmp_path / "run", "")
    command = torchrun_command(2, (DUMMY,), ["--run-dir", str(run.path)], tmp_path / "logs")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (run.path / "ready.json").exists())
        assert stop(run.path, timeout=20.0) == 0
        assert agent.wait(timeout=20) == 0
    finally:
        agent.kill()
        agent.wait()


def test_stop_names_what_is_not_there(tmp_path):
    with pytest.raises(NotFoundError, match="registered"):
        stop(tmp_path / "nothing")


def test_stop_of_a_hung_server_does_not_hang(tmp_path, sleeper):
    run = RunDirectory.own(tmp_path, "session")
    record_as(run, 0, sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_status(sleeper.pid).stopped)  # else SIGTERM may come first
    with pytest.raises(PeerLostError, match=r"rank 0 \(pid"):
        stop(tmp_path, timeout=0.3)
