"""What a run directory promises: private, one server's, one decision."""

import json
import os
import resource
import stat

import pytest

from tpdet.errors import (
    NotPermittedError,
    PeerLostError,
    ResourceError,
    UsageError,
)
from tpdet.launch.life.run_directory import ExitDecision, RunDirectory, open_run_directory
from tpdet.launch.ranks.environment import RankEnvironment


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
    assert run.decide_exit(65, "bad_checkpoint", 3, "truncated")
    assert not run.decide_exit(75, "engine_dead", 0)
    assert run.exit_decision() == ExitDecision(65, "bad_checkpoint", 3, "truncated")
    content = json.loads((tmp_path / "exit.json").read_text())
    assert content == {"exit": 65, "code": "bad_checkpoint", "rank": 3, "message": "truncated"}
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


def test_a_disk_that_takes_no_byte_is_no_resource(tmp_path):
    """What an earlier start left there may fit still; what this one writes does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # Python ignores the signal
    try:
        with pytest.raises(
            ResourceError, match=r"run cannot be written \(File too large\): choose"
        ):
            RunDirectory.own(tmp_path / "run", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    RunDirectory.own(tmp_path / "run", "a").release()
