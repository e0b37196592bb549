"""Processes on this host, lost peers among them, and the codes of errors."""

import os
import signal

import pytest

from tests.launch.sleeping_rank import record_as, sleeping, wait_for
from tpdet.errors import CheckpointError, PeerLostError
from tpdet.launch.host.processes import children_of, living_process, process_status, send_signal
from tpdet.launch.life.lifecycle import check_peers, exit_of, lost_local_peers
from tpdet.launch.life.run_directory import RunDirectory


@pytest.fixture
def sleeper():
    with sleeping() as process:
        yield process


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
