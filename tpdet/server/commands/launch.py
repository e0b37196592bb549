"""`tpdet launch slurm|torchrun|mpirun`: prints how to start ranks on a cluster, or starts them.

Flags that the launcher does not know go to the server. They are checked here as `tpdet serve`
checks them, and paths become absolute, since ranks may start in another folder. Of the model only
its existence is checked.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from tpdet.arguments.command_line import Help
from tpdet.checkpoint.resolve import is_model
from tpdet.errors import NotFoundError, NotPermittedError, UsageError
from tpdet.launch.life.run_directory import default_path, new_session
from tpdet.launch.life.run_secret import SECRET_VARIABLE
from tpdet.launch.start import mpirun, slurm, torchrun
from tpdet.server.settings.settings import Settings, load_settings

_PATHS = (
    "model", "tokenizer", "chat_template", "config", "api_key_file", "admin_key_file",
    "run_secret_file", "run_dir", "audit_dir", "audit_key", "answer_cache", "batch_dir",
)  # fmt: skip
_MADE = ("run_dir", "audit_dir", "answer_cache", "batch_dir")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
_SBATCH_OPTIONS = ("time", "partition", "account", "job-name", "output", "qos", "constraint")
_SBATCH_DEFAULTS = {"time": "24:00:00", "job-name": "tpdet", "output": "tpdet-%%j.log"}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see tpdet launch --help")


def launch_command(arguments: Sequence[str]) -> int:
    """Run `tpdet launch ...`; the exit code. Raises UsageError before anything is started."""
    options, rest = _parser().parse_known_args(list(arguments))
    rest = rest[1:] if rest[:1] == ["--"] else rest
    settings = load_settings(rest, f"tpdet launch {options.launcher}")
    if not options.model_on_nodes and getattr(options, "template", None) != "container":
        _look_for_model(settings, starts=getattr(options, "submit", False) or options.run)
    rest = absolute_paths(rest, settings)
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
    job.add_argument("--nodes", type=int, default=1, help="hosts of the job")
    job.add_argument("--gpus-per-node", type=int, default=8, help="0 for a job without GPUs")
    job.add_argument("--ranks-per-node", type=int, help="(default: as many as GPUs, at least 1)")
    job.add_argument(
        "--template",
        choices=list(slurm.TEMPLATES),
        help="(default: one-node, or srun on several nodes)",
    )
    job.add_argument("--image", help="Apptainer image, for --template container")
    for name in _SBATCH_OPTIONS:
        usual = _SBATCH_DEFAULTS.get(name, "the cluster's")
        job.add_argument(f"--{name}", help=f"as sbatch takes it (default: {usual})")
    job.add_argument("--submit", action="store_true", help="hand it to sbatch, print the job id")
    agents = kinds.add_parser("torchrun", help="the command for each host", allow_abbrev=False)
    agents.add_argument("--nodes", type=int, default=1, help="hosts")
    agents.add_argument("--ranks-per-node", type=int, required=True, help="as many as GPUs")
    agents.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several hosts meet")
    agents.add_argument(
        "--node-rank",
        type=int,
        help="which host: 0 is that of the endpoint; without it, the commands of all",
    )
    agents.add_argument(
        "--rdzv-backend",
        choices=[torchrun.STATIC, torchrun.C10D],
        default=torchrun.STATIC,
        help="static unpickles nothing; c10d lets whoever reaches the port run code, and is one "
        "command for all hosts",
    )
    ranks = kinds.add_parser("mpirun", help="the command, for one host", allow_abbrev=False)
    ranks.add_argument("--ranks", type=int, required=True, help="ranks in all")
    ranks.add_argument("--ranks-per-node", type=int, help="(default: all)")
    ranks.add_argument("--hosts", metavar="HOST:N,...", help="hosts, and how many ranks on each")
    ranks.add_argument("--mpi", choices=[mpirun.OPEN_MPI, mpirun.MPICH], help="found if not given")
    ranks.add_argument(
        "--allow-run-as-root", action="store_true", help="let Open MPI's mpirun start as root"
    )
    job.set_defaults(run=False)
    for kind in (agents, ranks):
        kind.add_argument("--run", action="store_true", help="run the command instead")
    for kind in (job, agents, ranks):
        kind.add_argument(
            "--model-on-nodes",
            action="store_true",
            help="the model's directory is there, on the nodes: do not look for it here",
        )
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
    """Print the command, or those of all hosts, or become it."""
    _need_secret(options.nodes > 1, settings)

    def command(node: int | None) -> list[str]:
        return torchrun.cluster_command(
            options.nodes,
            options.ranks_per_node,
            options.rdzv_endpoint,
            rest,
            node,
            options.rdzv_backend,
        )

    if options.rdzv_backend == torchrun.C10D:
        _warn(torchrun.C10D_WARNING)
    alone = options.nodes == 1 or options.rdzv_backend == torchrun.C10D
    if options.run:
        sys.stdout.flush()
        words = command(options.node_rank)
        os.execvp(words[0], words)
    if alone or options.node_rank is not None:
        print(shlex.join(command(options.node_rank)))
        return 0
    commands = [shlex.join(command(node)) for node in range(options.nodes)]
    first, _, _ = options.rdzv_endpoint.rpartition(":")
    for node, line in enumerate(commands):
        print(f"# on node {node}" + (f" ({first})" if node == 0 else ""), line, sep="\n")
    return 0


def _mpirun(options: argparse.Namespace, rest: list[str], settings: Settings) -> int:
    exports = mpirun.meeting_point(options.hosts)
    _need_secret(bool(exports), settings)
    if options.run and settings.server.run_dir is None:
        rest = [*rest, "--run-dir", str(default_path(f"mpirun-{new_session()}"))]
    kind = options.mpi or mpirun.which_mpi()
    as_root = None if options.allow_run_as_root else mpirun.refusal_of_root(kind)
    if as_root is not None and options.run:
        raise NotPermittedError(as_root)
    command = mpirun.mpirun_command(
        options.ranks,
        rest,
        kind,
        options.ranks_per_node,
        options.hosts,
        exports,
        as_root=options.allow_run_as_root,
    )
    if not options.run:
        if as_root is not None:
            _warn(as_root)
        print(shlex.join(command))
        return 0
    folder = Path(
        load_settings(rest, "tpdet launch mpirun").server.run_dir or tempfile.gettempdir()
    )
    return mpirun.run(command, folder, settings.server.drain_timeout)


def _look_for_model(settings: Settings, starts: bool) -> None:
    """Say that there is no model here; raise NotFoundError instead if something `starts` now."""
    name = settings.engine.model
    path = Path(name)
    if is_model(name):
        return
    remedy = "give a Hugging Face directory, or --model-on-nodes if it is there on the nodes alone"
    if path.is_dir():
        problem = f"model {name!r} is a directory without config.json: {remedy}"
    elif _HUB_NAME.fullmatch(name):
        _warn(f"model {name!r} is no directory here: the ranks would download it from the hub")
        return
    else:
        problem = f"model {name!r} is no directory here: {remedy}"
    if starts:
        raise NotFoundError(problem)
    _warn(problem)


def absolute_paths(arguments: Sequence[str], settings: Settings) -> list[str]:
    """The server's flags with absolute paths, for ranks that start in another folder.

    The model keeps its name in the API. A path that leads nowhere stays as it is (it may be a hub
    name), except a directory that a server makes.
    """
    found = list(arguments)
    given = {**settings.engine.model_dump(), **settings.server.model_dump()}
    given["config"] = _value_of("--config", found)
    for name in _PATHS:
        old = given[name]
        if not old or os.path.isabs(old) or not (name in _MADE or os.path.exists(old)):
            continue
        _replace(found, name, old, os.path.abspath(old))
        if name == "model" and settings.server.served_model_name is None:
            found.append(f"--served-model-name={old}")
    return found


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for word, after in pairwise([*arguments, ""]):
        if word == flag:
            return after
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None


def _replace(arguments: list[str], name: str, old: str, new: str) -> None:
    """Put `new` where the setting stands among the arguments; at the end, if it came otherwise."""
    flag = "--" + name.replace("_", "-")
    for at, word in enumerate(arguments):
        spelled, equals, _ = word.replace("_", "-").partition("=")
        if spelled == flag and equals and word.endswith("=" + old):
            arguments[at] = f"{flag}={new}"
            return
        if word.replace("_", "-") == flag and arguments[at + 1 : at + 2] == [old]:
            arguments[at + 1] = new
            return
    if name == "model" and old in arguments:  # without a flag
        arguments[arguments.index(old)] = new
    else:
        arguments.append(f"{flag}={new}")


def _warn(text: str) -> None:
    print(f"tpdet launch: {text}", file=sys.stderr)


def _need_secret(several_hosts: bool, settings: Settings) -> None:
    given = settings.server.run_secret_file is not None or SECRET_VARIABLE in os.environ
    if several_hosts and not given:
        raise UsageError(
            "ranks on several hosts need one secret: --run-secret-file FILE (openssl rand -hex 32, "
            "mode 0600, a copy on each host)"
        )
