"""A server in a job of a real Slurm whose nodes are on this host (scripts/slurm_two_nodes.sh)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.lib.server.cluster import FLAGS, all_gone, family, wait_ready


class _Disks:
    """Each node's own folder of run directories: TMPDIR, which is ROOT/disk to a node.

    It is ROOT/n1/disk and ROOT/n2/disk to us.
    """

    def __init__(self, root: Path) -> None:
        name = str(len(list((root / "n1/disk").iterdir())))  # short: a socket's path is bounded
        self.disks = [root / node / "disk" / name for node in ("n1", "n2")]
        for disk in self.disks:
            disk.mkdir()
        self.places = {"TMPDIR": str(root / "disk" / name), "XDG_RUNTIME_DIR": ""}
        self.pattern = f"n?/disk/{name}/tpdet-*/**/ready.json"

    def ranks(self) -> list[dict[int, int]]:
        """The ranks' process numbers by rank, of each node."""
        found = []
        for disk in self.disks:
            paths = disk.glob("tpdet-*/**/ranks/*.json")
            found.append({int(p.stem): _number("pid", p.read_text()) for p in paths})
        return found


class Step(_Disks):
    """A server whose ranks a command (srun, or salloc with mpirun) starts on both nodes, ready."""

    def __init__(self, slurm, root: Path, folder: Path, model, command: list[str]) -> None:
        super().__init__(root)
        secret, self.log = folder / "given", folder / "log"
        secret.write_text("5a" * 32)
        secret.chmod(0o600)
        server = ["-m", "tpdet.serve", "--model", str(model), *FLAGS]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, sys.executable, *server, "--run-secret-file", str(secret)],
                env=slurm | self.places,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            alive = lambda: self._process.poll() is None
            self.url = wait_ready(root, self.pattern, alive, self.log, 120.0)["url"]
        except BaseException:
            self.end()
            raise
        self.everyone = [process for disk in self.disks for process in family(disk)]

    def drain(self) -> int:
        """Stop rank 0; the command's exit code, once everybody has gone."""
        os.kill({**self.ranks()[0], **self.ranks()[1]}[0], signal.SIGTERM)
        code = self._process.wait(60)
        assert all_gone(self.everyone), self.log.read_text()
        return code

    def end(self) -> None:
        """Have srun or salloc end its job, if it runs."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def slurm_step(slurm, root: Path, folder: Path, model, command: list[str]) -> Iterator[Step]:
    """A `Step`; it has ended afterwards."""
    step = Step(slurm, root, folder, model, command)
    try:
        yield step
    finally:
        step.end()


class Job(_Disks):
    """A server in a job of `tpdet launch slurm --submit`, ready.

    `slurm` is the environment in which sbatch speaks to the Slurm in `root`.
    """

    def __init__(self, slurm, root: Path, folder: Path, model, *options: str) -> None:
        super().__init__(root)
        places = {**self.places, "TPDET_SECRET_FOLDER": str(folder)}
        self._environment, self._folder = slurm | places, folder
        self.log = folder / "log"
        launch = ["-m", "tpdet", "launch", "slurm", "--gpus-per-node", "0", *options]
        # A busy machine needs more than the default; the script gives jobs 60 s after a scancel.
        server = ["--model", str(model), *FLAGS, "--drain-timeout", "50"]
        done = self.run(sys.executable, *launch, "--output", str(self.log), "--submit", *server)
        self.number = done.strip()
        try:
            self.ready = wait_ready(
                self.disks[0], "tpdet-*/**/ready.json", self.runs, self.log, 120.0
            )
        except BaseException:
            self.run("scancel", self.number)
            raise
        self.url = self.ready["url"]
        self.everyone = [*self.processes(), *(p for disk in self.disks for p in family(disk))]

    def end(self) -> None:
        """Kill what a failed test left."""
        self.run("scancel", "--full", "--signal=KILL", self.number, check=False)

    def run(self, *command: str, check=True) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def runs(self) -> bool:
        """Whether it has not ended."""
        return bool(self.run("squeue", "--noheader", "--jobs", self.number, check=False).strip())

    def processes(self) -> list[psutil.Process]:
        """All that the job started and is still there: script, launchers, their daemons, ranks."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ()
            except psutil.Error:
                continue
            wanted = (self._environment["SLURM_CONF"], self.number)
            if (mine.get("SLURM_CONF"), mine.get("SLURM_JOB_ID")) == wanted:
                found.append(process)
        return found

    def wait(self, seconds: float = 60.0) -> str:
        """Until it has ended and left nobody; its exit code and signal, as Slurm has them."""
        deadline = time.monotonic() + seconds
        while self.runs():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        assert all_gone(self.everyone) and not self.processes(), self.log.read_text()
        assert not list(self._folder.glob(".tpdet-secret*"))
        return re.search(r"ExitCode=(\S+)", self.run("scontrol", "show", "job", self.number))[1]

    def decided(self) -> list[int]:
        """The codes in the ranks' run directories."""
        paths = [path for disk in self.disks for path in disk.glob("tpdet-*/**/exit.json")]
        return [_number("exit", path.read_text()) for path in paths]


def _number(name: str, text: str) -> int:
    return int(re.search(rf'"{name}":(\d+)', text)[1])
