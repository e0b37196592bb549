"""A real Slurm of two nodes on this host runs the shipped templates: bits, drain, nobody left."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.server.cluster import FLAGS, LONG, Asking, all_gone, ask, family, wait_ready
from tests.slurm_cluster import slurm_cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which sbatch speaks to it."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


class Job:
    """A server in a job of `tpdet launch slurm`, ready."""

    def __init__(self, slurm, folder, model, *options):
        self._environment = slurm | {"TMPDIR": str(folder), "TPDET_SECRET_FOLDER": str(folder)}
        self.folder, self.log = folder, folder / "log"
        launch = ["-m", "tpdet", "launch", "slurm", "--gpus-per-node", "0", *options]
        server = ["--model", str(model), *FLAGS]
        done = self.run(sys.executable, *launch, "--output", str(self.log), "--submit", *server)
        self.number = done.strip()
        try:
            self.ready = wait_ready(folder, "tpdet-*/**/ready.json", self.runs, self.log)
        except BaseException:
            self.run("scancel", self.number)
            raise
        self.url = self.ready["url"]
        self.everyone = family(folder)

    def run(self, *command):
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def runs(self):
        """Whether it has not ended."""
        return bool(self.run("squeue", "--noheader").strip())

    def wait(self, seconds=40.0):
        """Until it has ended; its exit code and signal, as Slurm has them."""
        deadline = time.monotonic() + seconds
        while self.runs():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        assert all_gone(self.everyone), self.log.read_text()
        assert not list(self.folder.glob(".tpdet-secret*"))
        shown = self.run("scontrol", "show", "job", self.number)
        return re.search(r"ExitCode=(\S+)", shown)[1]

    def decided(self):
        """The codes in the ranks' run directories."""
        texts = [path.read_text() for path in self.folder.glob("tpdet-*/**/exit.json")]
        return [int(re.search(r'"exit":(\d+)', text)[1]) for text in texts]


def test_srun_of_two_nodes_serves_the_bits_of_one_rank_and_scancel_drains(
    slurm, cluster_model, answers_alone, tmp_path
):
    job = Job(slurm, tmp_path, cluster_model, "--nodes", "2")
    assert job.ready["tp"] == 2 and len(list(tmp_path.glob("tpdet-*/slurm-*/ranks/*"))) == 2
    assert ask(job.url) == answers_alone[0]
    asking = Asking(job.url)
    job.run("scancel", job.number)
    assert asking.result() == answers_alone[1], job.log.read_text()
    job.wait()
    assert job.decided() == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("srun", ("--nodes", "2", "--ranks-per-node", "2")),
        ("torchrun", ("--nodes", "2", "--ranks-per-node", "2")),
        ("one-node", ("--nodes", "1", "--ranks-per-node", "2")),
    ],
)
def test_every_template_at_more_ranks(
    slurm, cluster_model, answers_alone, tmp_path, template, options
):
    if template == "torchrun":
        slurm = slurm | {"MASTER_PORT": "29517"}
    job = Job(slurm, tmp_path, cluster_model, "--template", template, *options)
    assert (ask(job.url), ask(job.url, LONG)) == answers_alone
    job.run("scancel", "--signal=TERM", job.number)  # as the time limit's warning does
    code = job.wait()
    assert job.decided() and set(job.decided()) == {0}, job.log.read_text()
    assert template == "torchrun" or code == "0:0", job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_one_killed_rank_ends_the_job_with_75(slurm, cluster_model, tmp_path, rank):
    job = Job(slurm, tmp_path, cluster_model, "--nodes", "2", "--ranks-per-node", "2")
    records = list(tmp_path.glob(f"tpdet-*/*/ranks/{rank}.json"))
    pid = int(re.search(r'"pid":(\d+)', records[0].read_text())[1])
    os.kill(pid, signal.SIGKILL)
    assert job.wait() == "75:0", job.log.read_text()
