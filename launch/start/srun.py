"""The srun command for a program of tpdet, and the size of the cluster that would run it."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from tpdet.errors import NotFoundError
from tpdet.launch.host.interpreter import python_command

_SECONDS = 30.0  # for a controller that answers
_REMEDY = "run this on a login node or in a job of a cluster, or leave slurm out"


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
            timeout=_SECONDS,
            env=dict(environ),
        )
    except FileNotFoundError as error:
        raise NotFoundError(f"Slurm's {error.filename} is not installed here: {_REMEDY}") from error
    except subprocess.TimeoutExpired as error:
        raise NotFoundError(
            f"Slurm's controller does not answer in {_SECONDS:g} s: {_REMEDY}"
        ) from error
    lines = [line.split() for line in done.stdout.splitlines()]
    nodes = {name for name, state in lines if state.startswith(("idle", "mix", "alloc", "comp"))}
    if done.returncode != 0 or not nodes:
        said = done.stderr.strip()[:300] or "no node of it is up"
        raise NotFoundError(f"no Slurm cluster answers here ({said}): {_REMEDY}")
    return len(nodes)
