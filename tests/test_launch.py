"""Launching: who a rank is, what a run directory promises, and that nothing outlives the server."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpdet.errors import (
    CheckpointError,
    NotFoundError,
    NotPermittedError,
    PeerLostError,
    ResourceError,
    UsageError,
)
from tpdet.launch.environment import RankEnvironment, read_environment
from tpdet.launch.lifecycle import check_peers, exit_of, lost_local_peers
from tpdet.launch.processes import children_of, living_process, process_status, send_signal
from tpdet.launch.run_directory import ExitDecision, RunDirectory, open_run_directory
from tpdet.launch.supervise import stop
from tpdet.launch.torchrun import rank_environment, torchrun_command

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
DUMMY = str(Path(__file__).with_name("dummy_rank.py"))
SERVE = (
    "import sys; from pathlib import Path; from tpdet.launch.supervise import serve; "
    "sys.exit(serve(int(sys.argv[2]), ['--case', sys.argv[3]], Path(sys.argv[1]), "
    "program=(sys.argv[4],), step_timeout=1.0, drain_timeout=float(sys.argv[5])))"
)


# --- the environment ---------------------------------------------------------------------------


def test_a_process_without_a_launcher_runs_alone():
    assert read_environment({"PATH": "/bin"}) == RankEnvironment()


def test_torchruns_environment_is_read():
    assert read_environment(TORCHRUN) == RankEnvironment(
        3, 8, 1, 2, launched=True, launcher="torchrun"
    )


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_half_set_environment_is_refused_by_name(missing):
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"not {missing}.*torchrun"):
        read_environment(half)


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "8"}, {"RANK": "x"}, {"RANK": "-1"}, {"LOCAL_RANK": "2"}, {"WORLD_SIZE": "1"}],
)
def test_a_contradictory_environment_is_refused(wrong):
    with pytest.raises(UsageError, match="torchrun"):
        read_environment({**TORCHRUN, **wrong})


def test_the_command_runs_the_module_and_shares_the_cores(tmp_path):
    command = torchrun_command(2, ("-m", "tpdet.serve"), ["--model", "m"], tmp_path)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[-4:] == ["-m", "tpdet.serve", "--model", "m"]
    cores = len(os.sched_getaffinity(0))
    assert rank_environment(1, {})["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment(10 * cores, {})["OMP_NUM_THREADS"] == "1"
    assert rank_environment(1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert rank_environment(1, {})["NCCL_NVLS_ENABLE"] == "0"


# --- the run directory -------------------------------------------------------------------------


def test_a_run_directory_is_private(tmp_path):
    run = RunDirectory.own(tmp_path / "a" / "run", "session")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.write_ready({"tp": 2})
    assert stat.S_IMODE((run.path / "ready.json").stat().st_mode) == 0o600
    assert json.loads((run.path / "ready.json").read_text()) == {"tp": 2}


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(NotPermittedError, match="mode 777"):
        RunDirectory.own(tmp_path, "session")


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="not a directory"):
            RunDirectory.own(path, "session")


def test_two_servers_cannot_share_a_run_directory(tmp_path):
    first = RunDirectory.own(tmp_path, "one")
    first.register(0, "cpu")
    with pytest.raises(ResourceError, match=f"in use by process {os.getpid()}"):
        RunDirectory.own(tmp_path, "two")
    assert first.current and len(first.records()) == 1
    first.release()
    second = RunDirectory.own(tmp_path, "two")
    assert second.records() == [] and second.current and not first.current


def test_the_owner_clears_an_earlier_server(tmp_path):
    first = RunDirectory.own(tmp_path, "one")
    first.write_ready({})
    first.decide_exit(75, "engine_dead", 1)
    first.release()
    second = RunDirectory.own(tmp_path, "two")
    assert second.exit_decision() is None and not (tmp_path / "ready.json").exists()


def test_only_the_first_decision_counts(tmp_path):
    run = RunDirectory.own(tmp_path, "session")
    assert run.decide_exit(65, "bad_checkpoint", 3)
    assert not run.decide_exit(75, "engine_dead", 0)
    assert run.exit_decision() == ExitDecision(65, "bad_checkpoint", 3)
    content = json.loads((tmp_path / "exit.json").read_text())
    assert content == {"exit": 65, "code": "bad_checkpoint", "rank": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "exit.json",
        "lock",
        "ranks",
        "secret",
        "session.json",
    ]


def test_a_rank_of_an_earlier_session_decides_nothing(tmp_path):
    RunDirectory.own(tmp_path, "new")
    late = RunDirectory(tmp_path, "old")
    assert not late.decide_exit(75, "engine_dead", 1) and late.exit_decision() is None


def test_joining_waits_for_the_own_session_only(tmp_path):
    RunDirectory.own(tmp_path, "theirs")
    with pytest.raises(PeerLostError, match=r"within 0.1 s"):
        RunDirectory.join(tmp_path, "ours", timeout=0.1)
    assert RunDirectory.join(tmp_path, "theirs").current


def test_local_rank_0_owns_and_the_others_join(tmp_path, monkeypatch):
    monkeypatch.delenv("TPDET_SESSION", raising=False)
    owner = open_run_directory(tmp_path, RankEnvironment(0, 2, 0, 2, launched=True))
    other = open_run_directory(tmp_path, RankEnvironment(1, 2, 1, 2, launched=True))
    assert owner.session == other.session and other.current


# --- processes and peers -----------------------------------------------------------------------


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def record_as(run, rank, process):
    """Register another process as a rank; returns its start time."""
    run.register(rank, "cpu")
    file = run.path / "ranks" / f"{rank}.json"
    start_time = process_status(process.pid).start_time
    content = {**json.loads(file.read_text()), "pid": process.pid, "start_time": start_time}
    file.write_text(json.dumps(content))
    return start_time


def test_a_recycled_pid_is_never_signalled(sleeper):
    start_time = process_status(sleeper.pid).start_time
    assert not send_signal(sleeper.pid, start_time + 1, signal.SIGKILL)
    assert living_process(sleeper.pid, start_time) is not None
    assert send_signal(sleeper.pid, start_time, signal.SIGKILL)
    wait_for(lambda: process_status(sleeper.pid).dead)
    assert living_process(sleeper.pid, start_time) is None
    assert not send_signal(sleeper.pid, start_time, signal.SIGKILL)


def test_children_are_found(sleeper):
    assert sleeper.pid in [child.pid for child in children_of(os.getpid())]


def test_lost_peers_are_told_from_living_ones(tmp_path, sleeper):
    run = RunDirectory.own(tmp_path, "session")
    run.register(0, "cpu")
    record_as(run, 1, sleeper)
    assert lost_local_peers(run, 0) == []
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_status(sleeper.pid).stopped)
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {sleeper.pid}\) is stopped"):
        check_peers(run, 0)
    sleeper.kill()
    wait_for(lambda: process_status(sleeper.pid).dead)
    assert [peer.reason for peer in lost_local_peers(run, 0)] == ["dead"]
    sleeper.wait()
    assert [peer.reason for peer in lost_local_peers(run, 0)] == ["gone"]
    run.decide_exit(0, "drained", 0)
    assert lost_local_peers(run, 0) == []


def test_errors_have_their_exit_codes():
    assert exit_of(CheckpointError("x")) == (65, "bad_checkpoint")
    assert exit_of(MemoryError()) == (71, "no_resource")
    assert exit_of(ZeroDivisionError()) == (70, "internal_error")


# --- tpdet serve and tpdet stop, with ranks that hold no model ---------------------------------


class Server:
    """A supervisor with dummy ranks, in processes of its own."""

    def __init__(self, path, ranks, case, drain_timeout):
        self.run = RunDirectory(path, "")
        command = [sys.executable, "-c", SERVE, str(path), str(ranks), case, DUMMY]
        environment = {name: v for name, v in os.environ.items() if name not in TORCHRUN}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
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
        assert not (it.run.path / "torchrun").exists()


@pytest.mark.parametrize(
    ("case", "code", "name", "rank"),
    [
        ("refuse", 65, "bad_checkpoint", 1),
        ("crash", 70, "internal_error", 0),
        ("silent", 75, "engine_dead", 1),
    ],
)
def test_the_deciding_ranks_code_is_passed_on(tmp_path, case, code, name, rank):
    with server(tmp_path, case=case) as it:
        exit_code, last_line = it.end()
        assert exit_code == code
        expected = {"event": "fatal", "code": name, "exit": code, "rank": rank}
        assert json.loads(last_line) == expected
        assert it.living() == []
        assert (it.run.path / f"last words of {rank}").exists()


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


def test_a_stop_signal_before_any_rank_registered_ends_everything_with_0(tmp_path):
    with server(tmp_path, ranks=2, case="slow start") as it:
        wait_for(lambda: (it.run.path / "torchrun").exists())
        it.process.send_signal(signal.SIGTERM)
        assert it.end()[0] == 0


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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
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
