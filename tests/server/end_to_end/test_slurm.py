"""A real Slurm of two nodes on this host runs the shipped templates: bits, drain, nobody left."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.lib.launchers import MPIRUN, slurm_cluster, slurm_environment
from tests.lib.ports import is_loopback
from tests.lib.server.cluster import Asking, ask
from tests.server.end_to_end.slurm_job import Job, slurm_step
from tpdet.launch.host.listeners import listeners
from tpdet.launch.start.mpirun import AGENT_VARIABLE

pytestmark = pytest.mark.long

TEMPLATES = ("srun", "torchrun", "mpirun", "container", "one-node")
WARNED = {"mpirun": ("--batch",)}
"""Which process of a job the time limit's warning goes to: its steps, or its script."""
_SLOW = [(template, "warning") for template in TEMPLATES]
_SLOW += [(template, "scancel") for template in TEMPLATES if template != "srun"]
DRAINS = [
    ("srun", 1, "scancel"),
    *(pytest.param(template, 2, end, marks=pytest.mark.slow) for template, end in _SLOW),
]
"""Template, ranks a node, and what ends the job: scancel, or what the time limit sends."""


@pytest.fixture(scope="module")
def root():
    """The folder of a Slurm that is up; its path is short, for a socket's is bounded."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm_cluster(Path(folder)):
        yield Path(folder)


@pytest.fixture(scope="module")
def slurm(root):
    """The environment in which sbatch speaks to it, and which jobs start in."""
    return slurm_environment(root)


@pytest.fixture
def start(slurm, root, cluster_model, tmp_path):
    """A function that starts a server by `tpdet launch slurm` with the given options."""
    jobs = []

    def job(template, *options, nodes=2, ranks_per_node=1, **more):
        environment = slurm | more
        if template == "container":
            environment |= apptainer(tmp_path) | {"TPDET_MODEL": str(cluster_model)}
            options = ("--image", "stub.sif", *options)
        sizes = ("--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node))
        model = "/model" if template == "container" else cluster_model
        jobs.append(
            Job(environment, root, tmp_path, model, "--template", template, *sizes, *options)
        )
        return jobs[-1]

    yield job
    for one in jobs:
        one.end()


def apptainer(folder: Path) -> dict[str, str]:
    """A double of the container runtime, on the PATH of the returned environment.

    It notes its arguments and runs the command here; a path that --bind would put elsewhere in
    the container is replaced by the host's.
    """
    (folder / "bin").mkdir()
    program = folder / "bin" / "apptainer"
    program.write_text(f"""#!/bin/bash
printf '%s\\n' "$@" >{folder}/apptainer-$SLURM_PROCID
[ "$1 $2 $3 $5" = "exec --nv --bind stub.sif" ] || exit 2
IFS=, read -ra bound <<<"$4"
shift 5
arguments=()
for one in "$@"; do
    for pair in "${{bound[@]}}"; do
        IFS=: read -r here there mode <<<"$pair"
        [ "$one" = "$there" ] && one=$here
    done
    arguments+=("$one")
done
PATH={Path(sys.executable).parent}:$PATH exec "${{arguments[@]}}"
""")
    program.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("template", "ranks_per_node", "end"), DRAINS)
def test_a_job_serves_the_bits_of_one_rank_and_drains(
    start, answers_alone, template, ranks_per_node, end
):
    nodes = 1 if template == "one-node" else 2
    job = start(template, nodes=nodes, ranks_per_node=ranks_per_node)
    ranks = range(nodes * ranks_per_node)
    assert job.ready["tp"] == len(ranks)
    assert [sorted(found) for found in job.ranks()] == [
        [*ranks[:ranks_per_node]],
        [*ranks[ranks_per_node:]],
    ]
    assert {rank["host"] for rank in job.ready["ranks"]} == {"n1"}
    assert ask(job.url) == answers_alone[0]
    asking = Asking(job.url)
    signal_only = ("--signal=TERM", *WARNED.get(template, ())) if end == "warning" else ()
    job.run("scancel", *signal_only, job.number)
    assert asking.result() == answers_alone[1], job.log.read_text()
    code = job.wait()
    assert code == "0:0" or end == "scancel", job.log.read_text()
    assert set(job.decided()) == {0}


STEPS = [
    ("cyclic", {"MASTER_ADDR": "127.0.0.1"}, [[0, 2], [1, 3]]),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("plane=2", {}, [[0, 1], [2, 3]]),
            ("block", {}, [[0, 1], [2, 3]]),
            ("arbitrary", {"MASTER_ADDR": "127.0.0.2"}, [[1, 3], [0, 2]]),
            ("mpirun", {}, [[0, 2], [1, 3]]),
        )
    ),
]
"""How srun (or mpirun --map-by node in a job) deals four ranks out to two nodes."""


@pytest.mark.parametrize(("how", "more", "by_node"), STEPS)
def test_ranks_dealt_out_to_nodes_in_any_way_serve_the_bits_of_one_rank(
    slurm, root, cluster_model, answers_alone, tmp_path, how, more, by_node
):
    (tmp_path / "hosts").write_text("n2\nn1\nn2\nn1\n")
    more = more | ({"SLURM_HOSTFILE": str(tmp_path / "hosts")} if how == "arbitrary" else {})
    command = ["srun", "--nodes=2", "--ntasks=4", "--overcommit", "--kill-on-bad-exit=1"]
    command += ["--cpu-bind=none", f"--distribution={how}"]
    if how == "mpirun":
        command = ["salloc", "--nodes=2", "--ntasks-per-node=2", MPIRUN or "mpirun", "-n", "4"]
        command += ["--map-by", "node:OVERSUBSCRIBE", "--bind-to", "none"]
    with slurm_step(slurm | more, root, tmp_path, cluster_model, command) as step:
        assert [sorted(ranks) for ranks in step.ranks()] == by_node
        assert ask(step.url) == answers_alone[0]
        opened = [each for process in step.everyone for each in listeners(process.pid)]
        assert opened and ("MASTER_ADDR" in more) == all(is_loopback(each) for each in opened), (
            opened
        )
        in_one_level = "nodes do not hold neighbouring ranks" in step.log.read_text()
        assert in_one_level == (by_node[0] != [0, 1])
        assert step.drain() == 0, step.log.read_text()
        assert not [path for disk in step.disks for path in disk.glob("**/secret")]


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_killed_rank_ends_the_job_with_75(start, template, rank):
    nodes = 1 if template == "one-node" else 2
    if rank >= 2 * nodes:
        pytest.skip("there is no such rank")
    job = start(template, nodes=nodes, ranks_per_node=2)
    numbers = {rank: pid for ranks in job.ranks() for rank, pid in ranks.items()}
    os.kill(numbers[rank], signal.SIGKILL)
    assert job.wait() == "75:0", job.log.read_text()


@pytest.mark.slow
def test_a_signal_to_open_mpis_daemons_ends_nobody_unless_they_hear_it(start, answers_alone):
    job = start("mpirun")
    job.run("scancel", "--signal=TERM", job.number)  # to steps: the daemon of n2
    assert ask(job.url) == answers_alone[0]
    job.run("scancel", "--batch", "--signal=TERM", job.number)
    assert job.wait() == "0:0", job.log.read_text()
    control = start("mpirun", **{AGENT_VARIABLE: "prted"})
    control.run("scancel", "--signal=TERM", control.number)
    control.wait()  # it has ended; with 75 unless it was idle


@pytest.mark.slow
def test_a_containers_ranks_see_the_model_the_secret_and_the_run_directory(start, tmp_path):
    job = start("container")
    arguments = [(tmp_path / f"apptainer-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert arguments[0] == arguments[1]
    bound = [one.split(":") for one in arguments[0][3].split(",")]
    secret, disk = bound[1][0], bound[2][0]
    assert bound[0][1:] == ["/model", "ro"] and bound[1] == [secret, secret, "ro"]
    assert bound[2] == [disk, disk] and Path(secret).parent == tmp_path
    assert job.processes() and all(
        process.environ()["TMPDIR"] == disk for process in job.processes()
    )
    job.run("scancel", job.number)
    job.wait()
