"""`tpdet launch slurm|torchrun|mpirun`: prints how to start ranks on a cluster, or starts them.

What the launcher does not know is the server's: those flags are checked here as `tpdet serve`
checks them. The model is not looked at.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tpdet.errors import UsageError
from tpdet.launch import mpirun, slurm, torchrun
from tpdet.launch.run_directory import default_path, new_session
from tpdet.launch.run_secret import SECRET_VARIABLE
from tpdet.server.settings import Settings, load_settings

_SBATCH_OPTIONS = ("time", "partition", "account", "job-name", "output", "qos", "constraint")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see tpdet launch --help")


def launch_command(arguments: Sequence[str]) -> int:
    """Run `tpdet launch ...`; the exit code. Raises UsageError before anything is started."""
    options, rest = _parser().parse_known_args(list(arguments))
    rest = rest[1:] if rest[:1] == ["--"] else rest
    settings = load_settings(rest, f"tpdet launch {options.launcher}")
    if options.launcher == "slurm":
        return _slurm(options, rest, settings)
    if options.launcher == "torchrun":
        return _torchrun(options, rest, settings)
    return _mpirun(options, rest, settings)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tpdet launch",
        description="Print or run what starts a server on a cluster; flags of tpdet serve follow.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(required=True, metavar="LAUNCHER", dest="launcher")
    job = kinds.add_parser("slurm", help="an sbatch script", allow_abbrev=False)
    job.add_argument("--nodes", type=int, default=1)
    job.add_argument("--gpus-per-node", type=int, default=8, help="0 for a job without GPUs")
    job.add_argument("--ranks-per-node", type=int, help="as many as GPUs, if not given")
    job.add_argument(
        "--template",
        choices=list(slurm.TEMPLATES),
        help="one-node, or srun on several nodes, if not given",
    )
    job.add_argument("--image", help="Apptainer image, for --template container")
    for name in _SBATCH_OPTIONS:
        job.add_argument(f"--{name}", help="as sbatch takes it")
    job.add_argument("--submit", action="store_true", help="hand it to sbatch, print the job id")
    agents = kinds.add_parser("torchrun", help="the command for each host", allow_abbrev=False)
    agents.add_argument("--nodes", type=int, default=1)
    agents.add_argument("--ranks-per-node", type=int, required=True)
    agents.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several hosts meet")
    agents.add_argument("--node-rank", type=int, help="which host: 0 is that of the endpoint")
    ranks = kinds.add_parser("mpirun", help="the command, for one host", allow_abbrev=False)
    ranks.add_argument("--ranks", type=int, required=True, help="ranks in all")
    ranks.add_argument("--ranks-per-node", type=int)
    ranks.add_argument("--hosts", metavar="HOST:N,...", help="hosts, and how many ranks on each")
    ranks.add_argument("--mpi", choices=[mpirun.OPEN_MPI, mpirun.MPICH], help="found if not given")
    for kind in (agents, ranks):
        kind.add_argument("--run", action="store_true", help="run the command instead")
    return parser


def _slurm(options: argparse.Namespace, rest: list[str], settings: Settings) -> int:
    drain = settings.server.drain_timeout
    if drain >= slurm.WARNING_SECONDS:
        raise UsageError(
            f"--drain-timeout {drain:g}: a job is told {slurm.WARNING_SECONDS} s before its time "
            "is over, so use less than that"
        )
    given = {name: getattr(options, name.replace("-", "_")) for name in _SBATCH_OPTIONS}
    job = slurm.SlurmJob(
        template=options.template or ("one-node" if options.nodes == 1 else "srun"),
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks_per_node=options.ranks_per_node or options.gpus_per_node or 1,
        image=options.image,
        options={name: value for name, value in given.items() if value is not None},
    )
    text = slurm.script(job, rest)
    print(slurm.submit(text) if options.submit else text.rstrip("\n"))
    return 0


def _torchrun(options: argparse.Namespace, rest: list[str], settings: Settings) -> int:
    """Print the command, or become it."""
    _need_secret(options.nodes > 1, settings)
    sizes = options.nodes, options.ranks_per_node
    command = torchrun.cluster_command(*sizes, options.rdzv_endpoint, rest, options.node_rank)
    if options.run:
        sys.stdout.flush()
        os.execv(command[0], command)
    print(shlex.join(command))
    return 0


def _mpirun(options: argparse.Namespace, rest: list[str], settings: Settings) -> int:
    exports = mpirun.meeting_point(options.hosts)
    _need_secret(bool(exports), settings)
    if options.run and settings.server.run_dir is None:
        rest = [*rest, "--run-dir", str(default_path(f"mpirun-{new_session()}"))]
    kind = options.mpi or mpirun.which_mpi()
    command = mpirun.mpirun_command(
        options.ranks, rest, kind, options.ranks_per_node, options.hosts, exports
    )
    if not options.run:
        print(shlex.join(command))
        return 0
    folder = Path(
        load_settings(rest, "tpdet launch mpirun").server.run_dir or tempfile.gettempdir()
    )
    return mpirun.run(command, folder, settings.server.drain_timeout)


def _need_secret(several_hosts: bool, settings: Settings) -> None:
    given = settings.server.run_secret_file is not None or SECRET_VARIABLE in os.environ
    if several_hosts and not given:
        raise UsageError(
            "ranks on several hosts need one secret: --run-secret-file FILE (openssl rand -hex 32, "
            "mode 0600, a copy on each host)"
        )
