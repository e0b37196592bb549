"""Makes the command and the environment that start a world, for each launcher (see ways)."""

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpdet.errors import NotFoundError, NotPermittedError
from tpdet.launch.host.interpreter import python_command
from tpdet.launch.ranks.pinned import fill
from tpdet.launch.start.local_ranks import local_ranks_command
from tpdet.launch.start.mpirun import mpirun_command, refusal_of_root, which_mpi
from tpdet.launch.start.slurm import cluster_nodes, srun_command
from tpdet.launch.start.torchrun import torchrun_command
from tpdet.tools.worlds.placement import VISIBLE
from tpdet.tools.worlds.ways import LaunchWay

SEEN = {
    "self": ("", "tpdet"),
    "torchrun": ("torchrun",),
    "slurm": ("Slurm",),
    "mpi": ("Open MPI", "MPICH"),
}
"""By launcher, the names that ranks may find in their environment."""


@dataclass(frozen=True)
class Launchers:
    """The launchers of this host: whose mpirun (or None), and how many nodes of Slurm."""

    mpi: str | None = None
    slurm_nodes: int = 0

    def start(
        self,
        tp: int,
        way: LaunchWay,
        program: Sequence[str],
        arguments: Sequence[str],
        logs: Path,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """(command, environment) for `program` (e.g. ("-m", "tpdet.serve")) as `tp` ranks.

        logs: a folder for torchrun's files. environment: variables for the ranks besides those of
        this process. Ranks pretend to be on nodes that the cluster lacks (pretended_nodes).
        """
        nodes = math.gcd(way.nodes, self.slurm_nodes) if way.launcher == "slurm" else 1
        variables = {**os.environ, **(environment or {})}
        fill(variables, tp // nodes, one_host=nodes == 1)
        if way.launcher == "slurm":
            variables.pop(VISIBLE, None)  # names GPUs of this host, not of the job's nodes
            return srun_command(tp, nodes, program, arguments), variables
        if way.launcher == "mpi" and self.mpi is not None:
            return mpirun_command(tp, arguments, self.mpi, program=program), variables
        if way.launcher == "self" and tp == 1:
            return python_command(*program, *arguments), variables
        if way.launcher == "self":
            return local_ranks_command(tp, program, arguments), variables
        return torchrun_command(tp, program, arguments, logs), variables


def find_launchers(ways: Sequence[LaunchWay]) -> Launchers:
    """Find the launchers of `ways`. Raises NotFoundError, NotPermittedError, with the remedy."""
    names = {way.launcher for way in ways}
    mpi = which_mpi() if "mpi" in names else None
    if mpi is not None and (refused := refusal_of_root(mpi)) is not None:
        raise NotPermittedError(refused)
    carried = any(way.transport == "mpi" for way in ways)
    if carried and importlib.util.find_spec("mpi4py") is None:
        raise NotFoundError("transport mpi needs mpi4py: pip install 'tpdet[mpi]'")
    return Launchers(mpi, cluster_nodes() if "slurm" in names else 0)
