"""Slurm: sbatch scripts filled in for one job and submitted, and the srun command of a program.

A template (`launch/start/templates`) is a complete script that `sbatch` accepts unchanged. Filling
it in changes its #SBATCH lines, names this Python, and sets the server's flags in place of the
script's arguments.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpdet.errors import NotFoundError, ResourceError, UsageError
from tpdet.launch.host.interpreter import python_command

TEMPLATES = {
    "one-node": "one_node.sbatch",
    "srun": "srun.sbatch",
    "torchrun": "torchrun.sbatch",
    "mpirun": "mpirun.sbatch",
    "container": "container.sbatch",
}
ONE_TASK_A_NODE = ("one-node", "torchrun")
"""Templates with one task on each node, which starts the node's ranks."""
WARNING_SECONDS = 60
"""How long before its time limit the job gets SIGTERM (`--signal` in the templates)."""
_CONTROLLER_SECONDS = 30.0
"""How long a controller may take to answer."""
_ELSEWHERE = "run this on a login node or in a job of a cluster, or leave slurm out"
_FOLDER = Path(__file__).resolve().parent / "templates"
_DIRECTIVE = re.compile(r"#SBATCH --([a-z-]+)(?:=(.*))?")


@dataclass(frozen=True)
class SlurmJob:
    """Resources that a job asks Slurm for; `options` are more of sbatch's ("partition": "gpu").

    Raises UsageError for sizes that make no world.
    """

    template: str
    nodes: int = 1
    gpus_per_node: int = 8
    ranks_per_node: int = 8
    image: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise UsageError(f"--template {self.template}: use one of {', '.join(TEMPLATES)}")
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: use 1 or more")
        if self.gpus_per_node < 0:
            raise UsageError(f"--gpus-per-node {self.gpus_per_node}: use 0 (no GPU) or more")
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise UsageError(
                f"--ranks-per-node {self.ranks_per_node} is over --gpus-per-node "
                f"{self.gpus_per_node}: a rank needs a GPU of its own"
            )
        if self.template == "one-node" and self.nodes != 1:
            raise UsageError(f"--template one-node with --nodes {self.nodes}: use srun or torchrun")
        if (self.template == "container") != (self.image is not None):
            raise UsageError("--image and --template container belong together: give both")


def template_text(name: str) -> str:
    """The template of that name, as it is shipped."""
    return (_FOLDER / TEMPLATES[name]).read_text()


def script(job: SlurmJob, arguments: Sequence[str]) -> str:
    """The sbatch script that serves with the server's flags `arguments`."""
    tasks = 1 if job.template in ONE_TASK_A_NODE else job.ranks_per_node
    values = {"nodes": str(job.nodes), "ntasks-per-node": str(tasks)}
    values |= {"gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}
    values |= dict(job.options)
    lines = []
    for line in template_text(job.template).splitlines():
        match = _DIRECTIVE.fullmatch(line)
        if match is None:
            lines.append(line)
        elif match[1] == "gpus-per-node" and not job.gpus_per_node:
            continue
        elif match[1] in values:
            lines.append(_directive(match[1], values.pop(match[1])))
        else:
            lines.append(line)
    end = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) + 1
    settings = ["", f"set -- {shlex.join(arguments)}"]
    settings += [f"export TPDET_PYTHON={shlex.quote(sys.executable)}"]
    settings += [f"export TPDET_RANKS_PER_NODE={job.ranks_per_node}"]
    settings += [f"export TPDET_IMAGE={shlex.quote(job.image)}"] if job.image else []
    lines[end:end] = [*(_directive(name, value) for name, value in values.items()), *settings]
    return "\n".join(lines) + "\n"


def submit(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Hand a script to sbatch; the job's number. Raises NotFoundError and ResourceError."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            capture_output=True,
            text=True,
            env=dict(os.environ if environ is None else environ),
        )
    except FileNotFoundError as error:
        raise NotFoundError(
            "sbatch is not installed here: run this on a login node, or leave --submit out"
        ) from error
    if done.returncode != 0:
        raise ResourceError(f"sbatch refused the job: {done.stderr.strip()[:500]}")
    return done.stdout.strip().partition(";")[0]


def _directive(name: str, value: str) -> str:
    if not re.fullmatch(r"[^\s'\"\\#][^\s'\"\\]*", value):
        raise UsageError(f"--{name} {value!r}: use a value without blanks and quotes")
    return f"#SBATCH --{name}={value}"


def srun_command(
    ranks: int, nodes: int, program: Sequence[str], arguments: Sequence[str]
) -> list[str]:
    """The command that runs `program` (e.g. ("-m", "tpdet.serve")) as `ranks` tasks of `nodes`.

    Ranks are numbered node by node, share cores if there are fewer cores than ranks, and all end
    when one fails. srun reads a site's partition and account from its SLURM_* variables.
    """
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={ranks // nodes}"),
        *("--distribution=block", "--cpu-bind=none", "--overcommit", "--kill-on-bad-exit=1"),
        *("--input=none", "--job-name=tpdet"),
        *python_command(*program, *arguments),
    ]


def cluster_nodes(environ: Mapping[str, str] | None = None) -> int:
    """How many nodes srun could use: the job's; outside of a job, all that are up.

    Raises NotFoundError without srun, without a controller that answers, and without such nodes.
    """
    environ = os.environ if environ is None else environ
    try:
        subprocess.run(["srun", "--version"], capture_output=True, env=dict(environ))
        if environ.get("SLURM_JOB_NUM_NODES"):
            return int(environ["SLURM_JOB_NUM_NODES"])
        done = subprocess.run(
            ["sinfo", "--noheader", "--responding", "--Node", "--format=%N %t"],
            capture_output=True,
            text=True,
            timeout=_CONTROLLER_SECONDS,
            env=dict(environ),
        )
    except FileNotFoundError as error:
        raise NotFoundError(
            f"Slurm's {error.filename} is not installed here: {_ELSEWHERE}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NotFoundError(
            f"Slurm's controller does not answer in {_CONTROLLER_SECONDS:g} s: {_ELSEWHERE}"
        ) from error
    lines = [line.split() for line in done.stdout.splitlines()]
    nodes = {name for name, state in lines if state.startswith(("idle", "mix", "alloc", "comp"))}
    if done.returncode != 0 or not nodes:
        reason = done.stderr.strip()[:300] or "no node of it is up"
        raise NotFoundError(f"no Slurm cluster answers here ({reason}): {_ELSEWHERE}")
    return len(nodes)
