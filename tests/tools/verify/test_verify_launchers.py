"""How verification starts a world: what it looks for on this host, commands, and their end."""

import os
import signal
import stat
import subprocess
import sys
import traceback

import pytest

from tests.lib.server.harness import eventually
from tpdet.cli import main
from tpdet.errors import NotFoundError, TpdetError
from tpdet.launch.start.slurm import cluster_nodes
from tpdet.tools.worlds import launchers, worlds
from tpdet.tools.worlds.launchers import Launchers, find_launchers
from tpdet.tools.worlds.ways import LaunchWay


def fake(folder, name, text):
    """A program on a PATH that has nothing else."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(folder)}


def test_a_missing_cluster_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(NotFoundError, match="srun is not installed here: run this on a login node"):
        cluster_nodes({"PATH": str(tmp_path)})
    environ = fake(tmp_path, "srun", "exit 0")
    with pytest.raises(NotFoundError, match="sinfo is not installed"):
        cluster_nodes(environ)
    fake(tmp_path, "sinfo", "echo 'slurm_load_partitions: no controller' >&2; exit 1")
    with pytest.raises(NotFoundError, match=r"answers here \(slurm_load_partitions: no contr"):
        cluster_nodes(environ)
    fake(tmp_path, "sinfo", "echo n1 down; echo n2 drain")
    with pytest.raises(NotFoundError, match="no node of it is up"):
        cluster_nodes(environ)


def test_no_cluster_ends_the_command_before_any_work(tmp_path, monkeypatch, capsys):
    """The model does not even exist: nothing looked at it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["verify", "/nowhere", "--device", "cpu", "--launcher", "torchrun,slurm"]
    assert main(arguments) == NotFoundError.exit_code
    assert "or leave slurm out" in capsys.readouterr().err


def test_a_node_of_two_partitions_is_one_and_a_job_has_its_own(tmp_path):
    environ = fake(tmp_path, "srun", "exit 0")
    fake(tmp_path, "sinfo", "echo n1 idle; echo n1 idle; echo n2 alloc; echo n3 'down*'")
    assert cluster_nodes(environ) == 2
    assert cluster_nodes(environ | {"SLURM_JOB_NUM_NODES": "5"}) == 5


def test_only_what_is_asked_for_is_looked_for(monkeypatch):
    monkeypatch.setattr(launchers, "which_mpi", lambda: "mpich")
    monkeypatch.setattr(launchers, "cluster_nodes", lambda: 2)
    assert find_launchers([LaunchWay("torchrun"), LaunchWay()]) == Launchers()
    assert find_launchers([LaunchWay("slurm"), LaunchWay("mpi")]) == Launchers("mpich", 2)
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    assert find_launchers([LaunchWay("mpi", "gather")]).mpi == "mpich"
    with pytest.raises(NotFoundError, match=r"mpi4py: pip install 'tpdet\[mpi\]'"):
        find_launchers([LaunchWay("mpi", "mpi")])


def test_each_launcher_has_its_command(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = Launchers("openmpi", 2)

    def start(tp, way):
        return found.start(tp, way, ["-m", "x"], ["A"], tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})

    tail = [sys.executable, "-P", "-m", "x", "A"]
    assert start(1, LaunchWay())[0] == tail
    for tp in (1, 2):
        command, environment = start(tp, LaunchWay("torchrun"))
        assert f"--nproc-per-node={tp}" in command and command[3] == "torch.distributed.run"
        assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    own = [sys.executable, "-P", "-m", "tpdet.launch.start.local_ranks", "2", "-m", "x", "A"]
    assert start(2, LaunchWay())[0] == own  # no store that others can reach
    command, _ = start(4, LaunchWay("mpi", nodes=2))
    assert command[:3] == ["mpirun", "-n", "4"] and command[-5:] == tail
    for nodes, real in ((1, 1), (2, 2), (4, 2), (3, 1)):  # a cluster of two nodes
        command, environment = start(12, LaunchWay("slurm", nodes=nodes))
        assert command[0] == "srun" and command[-5:] == tail
        assert {f"--nodes={real}", f"--ntasks-per-node={12 // real}", "--ntasks=12"} < {*command}
        assert "--distribution=block" in command and "--kill-on-bad-exit=1" in command
        assert ("GLOO_SOCKET_IFNAME" in environment) == (real == 1)
        assert "CUDA_VISIBLE_DEVICES" not in environment  # it names GPUs of this host


def test_a_launcher_is_told_to_end_its_ranks_when_verification_ends(tmp_path):
    ended, log = tmp_path / "ended", tmp_path / "log"
    script = f"trap 'echo told >{ended}; exit 1' TERM; echo ready; sleep 60 & wait; echo late"

    class StopError(Exception):
        pass

    def stop(_, frame):
        """Stop it while the launcher is waited for; one that just starts ends with this process."""
        waits = any(
            it.f_code is subprocess.Popen.wait.__code__ for it, _ in traceback.walk_stack(frame)
        )
        if waits and "ready" in log.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise StopError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with log.open("wb") as file, pytest.raises(StopError):
            worlds._run(["bash", "-c", script], dict(os.environ), file)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended.read_text() == "told\n" and "late" not in log.read_text()


def test_a_launcher_ends_with_a_verification_that_was_killed(tmp_path):
    folder = str(tmp_path)
    script = f"trap 'echo told >{folder}/ended; exit 1' TERM; echo $$ >{folder}/up; sleep 60 & wait"
    code = (
        "import os, sys; from tpdet.tools.worlds.worlds import _run\n"
        f"_run(['bash', '-c', sys.argv[1]], dict(os.environ), open({folder + '/log'!r}, 'wb'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script])
    try:
        eventually((tmp_path / "up").exists, 20)
    finally:
        process.kill()
        process.wait()
    eventually((tmp_path / "ended").exists, 5)


def test_a_world_that_fails_says_how_it_was_started(tmp_path):
    with pytest.raises(
        TpdetError, match=r"world of 1 ranks \(self, auto\) ended with 1:\n.*No mod"
    ):
        worlds.run_world(1, "no_such_module", [], tmp_path)
