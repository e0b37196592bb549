"""`mpirun python -m tpdet.serve` and `tpdet launch mpirun --run`: bits, drain, and nobody left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests.lib.launchers import ENVIRONMENT, MPIRUN, make_mpich_place, needs_mpirun
from tests.lib.ports import free_port
from tests.lib.server.cluster import FLAGS, LONG, Asking, all_gone, ask, family, wait_ready
from tpdet.launch.life.stop import stop

pytestmark = [pytest.mark.long, needs_mpirun]


@contextmanager
def started(folder, command, model, environment=ENVIRONMENT, run_dir="run"):
    """A server under `command`; (process, run directory, ready.json). Nobody is left afterwards.

    run_dir: "" for those that ranks make in TMPDIR, one a node.
    """
    log = folder / "log"
    flags = ["--model", str(model), *FLAGS, *(("--run-dir", str(folder / run_dir)) * bool(run_dir))]
    environment = environment | {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], env=os.environ | environment, stdout=output, stderr=output
        )
    everyone = []
    try:
        alive = lambda: process.poll() is None
        ready = wait_ready(folder, f"{run_dir or 'tpdet-*/*'}/ready.json", alive, log)
        (run,) = (path.parent for path in folder.glob("**/ready.json"))
        everyone = family(folder)
        assert len(everyone) == ready["tp"] + 1
        yield process, run, ready
    finally:
        process.kill()
        process.wait()
        assert all_gone(everyone), log.read_text()


def launch(ranks):
    return [sys.executable, "-m", "tpdet", "launch", "mpirun", "--run", "--ranks", str(ranks)]


def test_mpirun_serves_the_bits_of_one_rank_and_drains(cluster_model, answers_alone, tmp_path):
    with started(tmp_path, launch(2), cluster_model) as (process, run, ready):
        assert ready["tp"] == 2
        assert ask(ready["url"]) == answers_alone[0]
        asking, everyone = Asking(ready["url"]), family(run)
        process.send_signal(signal.SIGTERM)  # Open MPI itself would end its ranks at once
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
        assert asking.result() == answers_alone[1]
        assert json.loads((run / "exit.json").read_text())["code"] == "drained"
        assert all_gone(everyone, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_mpi_carries_the_bits_of_one_rank_and_a_drain_ends_it(
    cluster_model, answers_alone, tmp_path, ranks
):
    command = [MPIRUN, "-n", str(ranks), "--map-by", "slot:OVERSUBSCRIBE", sys.executable, "-m",
               "tpdet.serve", "--transport", "mpi"]  # fmt: skip
    with started(tmp_path, command, cluster_model) as (process, run, ready):
        assert ready["tp"] == ranks
        assert (ask(ready["url"]), ask(ready["url"], LONG)) == answers_alone
        # Not 0, if a rank had gone without MPI_Finalize.
        assert stop(run) == 0 and process.wait(30) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_rank_that_mpi_lost_ends_the_server_with_75(cluster_model, tmp_path):
    command = [*launch(2), "--transport", "mpi"]
    with started(tmp_path, command, cluster_model) as (process, run, ready):
        everyone = family(run)
        os.kill(ready["ranks"][1]["pid"], signal.SIGKILL)
        assert process.wait(30) == 75, (tmp_path / "log").read_text()
        assert all_gone(everyone, 2.0)


@pytest.mark.slow
def test_a_killed_rank_ends_the_server_with_75(cluster_model, tmp_path):
    with started(tmp_path, launch(2), cluster_model) as (process, run, ready):
        everyone = family(run)
        os.kill(ready["ranks"][1]["pid"], signal.SIGKILL)
        assert process.wait(30) == 75, (tmp_path / "log").read_text()
        assert all_gone(everyone, 2.0)


@pytest.mark.slow
def test_plain_mpirun_at_four_ranks(cluster_model, answers_alone, tmp_path):
    command = [MPIRUN, "-n", "4", "--map-by", "slot:OVERSUBSCRIBE", sys.executable, "-m",
               "tpdet.serve"]  # fmt: skip
    with started(tmp_path, command, cluster_model) as (process, run, ready):
        assert ready["tp"] == 4
        assert (ask(ready["url"]), ask(ready["url"], LONG)) == answers_alone
        assert stop(run) == 0 and process.wait(30) == 0
    again = tmp_path / "again"  # where no ready.json lies until this one is
    again.mkdir()
    with started(again, command, cluster_model) as (process, run, _):
        everyone = family(run)
        process.kill()  # mpirun is gone: the ranks follow it
        assert all_gone(everyone)


SOCKETS = {"HWLOC_SYNTHETIC": "package:2 core:2 pu:1"}
"""What Open MPI takes this machine for: four slots, on two packages."""
IN_TURN, IN_A_ROW = [0, 2, 1, 3], [0, 1, 2, 3]
MAPPINGS = [
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("package", IN_TURN),
            ("socket", IN_TURN),
            ("slot", IN_A_ROW),
            ("node", IN_A_ROW),
            ("", IN_A_ROW),
        )
    ),
]
"""What --map-by is given ("": nothing, the default), and the local ranks that come of it."""


@pytest.mark.parametrize(("mapping", "local_ranks"), MAPPINGS)
def test_a_plain_mpirun_serves_the_same_bits_by_every_mapping(
    cluster_model, answers_alone, tmp_path, mapping, local_ranks
):
    mapped = [MPIRUN, "-n", "4", *(("--map-by", mapping) if mapping else ())]
    environment = ENVIRONMENT | SOCKETS
    known = subprocess.run([*mapped, "true"], env=os.environ | environment, capture_output=True)
    if mapping == "socket" and known.returncode != 0:
        pytest.skip("this Open MPI does not know --map-by socket, the older name of package")
    command = [*mapped, sys.executable, "-m", "tpdet.serve"]
    with started(tmp_path, command, cluster_model, environment) as (process, run, ready):
        ranks = [psutil.Process(rank["pid"]).environ() for rank in ready["ranks"]]
        assert [int(rank["OMPI_COMM_WORLD_LOCAL_RANK"]) for rank in ranks] == local_ranks
        assert ask(ready["url"]) == answers_alone[0]
        assert stop(run) == 0 and process.wait(30) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_mpich_serves_the_bits_of_one_rank_drains_and_ends_with_a_killed_one(
    cluster_model, answers_alone, tmp_path
):
    programs = make_mpich_place(tmp_path / "mpich")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    plain = [programs / "mpirun", "-n", "2", programs / "python", "-m", "tpdet.serve"]
    for transport in ("gather", "mpi"):
        command = [*plain, "--transport", transport, "--drain-timeout", "50"]
        with started(tmp_path, command, cluster_model, environment) as (process, run, ready):
            assert ready["tp"] == 2 and ask(ready["url"]) == answers_alone[0]
            asking = Asking(ready["url"])
            process.send_signal(signal.SIGTERM)  # Hydra passes it on
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
            assert asking.result() == answers_alone[1]
        shutil.rmtree(run)
    ours = [programs / "python", "-m", "tpdet", "launch", "mpirun", "--run", "--ranks", "2"]
    with started(tmp_path, ours, cluster_model, environment) as (process, run, ready):
        everyone = family(run)
        os.kill(ready["ranks"][1]["pid"], signal.SIGKILL)
        assert process.wait(30) == 75, (tmp_path / "log").read_text()
        assert all_gone(everyone, 2.0)


@pytest.mark.slow
def test_hydra_deals_ranks_out_to_hosts_in_turn(cluster_model, answers_alone, tmp_path):
    """Two hosts to Hydra, whose daemons both run here: ranks 0 and 2 are on the first."""
    programs, secret = make_mpich_place(tmp_path / "mpich"), tmp_path / "given"
    secret.write_text("5a" * 32)
    secret.chmod(0o600)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **meet}
    hosts = ["-launcher", "fork", "-hosts", "n1,n2", "-ppn", "1"]
    command = [programs / "mpirun", *hosts, "-n", "4", programs / "python", "-m", "tpdet.serve"]
    command += ["--run-secret-file", str(secret)]
    (tmp_path / "t").mkdir()  # a socket's path is bounded
    with started(tmp_path / "t", command, cluster_model, environment, "") as (process, run, ready):
        assert sorted(path.name for path in (run / "ranks").iterdir()) == ["0.json", "2.json"]
        assert ask(ready["url"]) == answers_alone[0]
        assert "nodes do not hold neighbouring ranks" in (tmp_path / "t/log").read_text()
        assert stop(run) == 0 and process.wait(30) == 0, (tmp_path / "t/log").read_text()
    assert not list((tmp_path / "t").glob("**/secret"))
