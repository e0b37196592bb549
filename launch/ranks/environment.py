"""Which rank this process is, read from the environment its launcher set.

Launchers nest: a Slurm job may run torchrun or mpirun, and mpirun may start one torchrun agent a
host. The innermost launcher counts, in the order of `_READERS`. An outer launcher must agree with
it: either it states the same rank and size (srun's PMI, or a script that exports torchrun's names),
or it started the inner one's agents. Anything else is refused, and the message names both
launchers: `srun -n 8 torchrun --nproc-per-node 8`, for example, would start eight worlds.

These variables are read:

- TPDET_STORE and torchrun's first four, for ranks that a command of ours started
- torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
- Open MPI: OMPI_COMM_WORLD_*
- Hydra (MPICH, Intel MPI): PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
- Slurm: SLURM_PROCID and others, only in a step of srun (SLURM_STEP_ID), because a batch script
  itself has SLURM_PROCID too
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace

from tpdet.errors import UsageError
from tpdet.launch.host.processes import process_name
from tpdet.launch.ranks.node_list import first_host, tasks_on_node
from tpdet.launch.ranks.rank_environment import RankEnvironment

LOOPBACK_ADDRESS = "127.0.0.1"
TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN_ADDRESS_NAMES = ("MASTER_ADDR", "MASTER_PORT")
OPEN_MPI_NAMES = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
HYDRA_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
STORE_VARIABLE = "TPDET_STORE"
"""The file at which the ranks of this host meet, where a command of ours started them."""
STORE_FILE = "store"
"""The file's name in the folder of the start."""
START_VARIABLE = "TPDET_START"
"""Names this start where the ranks of a host have no parent in common (a wrapper around each)."""
FIRST_PORT, PORTS = 16384, 16384
"""Ports made of a job's name: below those that Linux gives to outgoing connections."""


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """This process's place, by its innermost launcher.

    Raises UsageError if a launcher's variables are half set, if two launchers disagree, or if the
    ranks of several hosts have no address to meet at.
    """
    environ = os.environ if environ is None else environ
    launchers = [rank for read in _READERS if (rank := read(environ)) is not None]
    if not launchers:
        return RankEnvironment()
    inner = launchers[0]
    for outer in launchers[1:]:
        _check_nesting(inner, outer, environ)
    if name := environ.get(START_VARIABLE):
        inner = replace(inner, session=_file_name(name))
    if inner.store or inner.launcher == "torchrun" or inner.size == 1:
        return inner
    return _with_meeting_point(inner, environ)


def _read_own(environ: Mapping[str, str]) -> RankEnvironment | None:
    store = environ.get(STORE_VARIABLE)
    if not store:
        return None
    _require(environ, TORCHRUN_NAMES, "tpdet serve")
    rank = _place("tpdet", *_numbers(environ, TORCHRUN_NAMES, "tpdet serve"))
    return replace(rank, store=store)


def _read_torchrun(environ: Mapping[str, str]) -> RankEnvironment | None:
    # Beside a store of ours the names are ours, whoever started what started the ranks.
    if environ.get(STORE_VARIABLE) or not any(environ.get(name) for name in TORCHRUN_NAMES):
        return None
    _require(environ, (*TORCHRUN_NAMES, *TORCHRUN_ADDRESS_NAMES), "torchrun")
    return _place("torchrun", *_numbers(environ, TORCHRUN_NAMES, "torchrun"))


def _read_open_mpi(environ: Mapping[str, str]) -> RankEnvironment | None:
    if not any(environ.get(name) for name in OPEN_MPI_NAMES):
        return None
    _require(environ, OPEN_MPI_NAMES, "Open MPI's mpirun")
    return _place("Open MPI", *_numbers(environ, OPEN_MPI_NAMES, "mpirun"))


def _read_hydra(environ: Mapping[str, str]) -> RankEnvironment | None:
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE without a local rank: that is Slurm.
    if not any(environ.get(name) for name in HYDRA_NAMES[2:]):
        if environ.get("PMI_RANK") and not environ.get("SLURM_STEP_ID"):
            _require(environ, HYDRA_NAMES, "MPICH's mpirun")
        return None
    _require(environ, HYDRA_NAMES, "MPICH's mpirun")
    return _place("MPICH", *_numbers(environ, HYDRA_NAMES, "mpirun"))


def _read_slurm(environ: Mapping[str, str]) -> RankEnvironment | None:
    if not environ.get("SLURM_STEP_ID"):
        return None
    _require(environ, (*SLURM_NAMES, "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE"), "srun")
    rank, size, local_rank, node = _numbers(environ, SLURM_NAMES, "srun")
    local_size = tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], node)
    restart = environ.get("SLURM_RESTART_COUNT") or "0"
    session = f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}-{restart}-{node}"
    environment = _place("Slurm", rank, size, local_rank, local_size)
    return replace(environment, session=_file_name(session))


_READERS = (_read_own, _read_torchrun, _read_open_mpi, _read_hydra, _read_slurm)
"""Innermost first."""


def _check_nesting(
    inner: RankEnvironment, outer: RankEnvironment, environ: Mapping[str, str]
) -> None:
    """Raise UsageError unless `outer` states the same rank, or may have started `inner`."""
    if (inner.rank, inner.size) == (outer.rank, outer.size):
        return
    if inner.store or inner.launcher == "torchrun":
        # One agent of torchrun, or one command of ours, is one task of the outer launcher.
        stated = None if inner.store else environ.get("GROUP_WORLD_SIZE")
        agents = stated or str(inner.size // inner.local_size)
        fits = agents == str(outer.size)
    else:
        # mpirun starts its daemons by srun, at most one a rank and none on its own host; two MPIs
        # never nest.
        fits = outer.launcher == "Slurm" and outer.size < inner.size
    if not fits:
        raise UsageError(
            f"two launchers disagree: {inner.launcher} says rank {inner.rank} of {inner.size}, "
            f"{outer.launcher} says rank {outer.rank} of {outer.size}: start the ranks with one of "
            "them, or one agent (torchrun, mpirun) a host from the other, or unset the variables "
            "of the one that does not count"
        )


def _with_meeting_point(rank: RankEnvironment, environ: Mapping[str, str]) -> RankEnvironment:
    """`rank` with an address and a port, which every rank finds to be the same.

    MASTER_ADDR and MASTER_PORT count if set. Else the address is the loopback's on one host, the
    first host of Slurm's list on several; the port is made of the job's name.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") if rank.launcher == "Slurm" else None
    nodes = nodes or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR")
    if not address and rank.one_host:
        address = LOOPBACK_ADDRESS
    if not address and nodes and environ.get("SLURM_DISTRIBUTION") != "arbitrary":
        address = first_host(nodes)  # dealt out in any other way, rank 0 is there
    job = _job_name(rank, environ)
    if not address or (job is None and not environ.get("MASTER_PORT")):
        raise UsageError(
            f"{rank.size} ranks of {rank.launcher} on several hosts have no address to meet at: "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every "
            "rank (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 with Open MPI, -genv NAME VALUE "
            "with MPICH)"
        )
    if environ.get("MASTER_PORT"):
        (port,) = _numbers(environ, ("MASTER_PORT",), rank.launcher)
    else:
        port = FIRST_PORT + zlib.crc32((job or "").encode()) % PORTS
    return replace(rank, address=address, port=port)


def _job_name(rank: RankEnvironment, environ: Mapping[str, str]) -> str | None:
    """A name that the ranks of this start share and no other ranks have; None if there is none."""
    if rank.launcher == "Slurm":
        return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    if namespace := environ.get("PMIX_NAMESPACE"):
        return namespace
    if rank.one_host:
        return process_name(os.getppid())
    return environ.get("SLURM_JOB_ID")


def _file_name(text: str) -> str:
    """A session's name: it becomes that of the run directory."""
    return re.sub(r"[^\w-]", "_", text[:100], flags=re.ASCII)


def _require(environ: Mapping[str, str], names: tuple[str, ...], program: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in names if environ.get(name)]
        raise UsageError(
            f"{', '.join(present)} set but not {', '.join(missing)}: start with {program}, which "
            "sets them all, or unset them to run one rank alone"
        )


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], program: str) -> list[int]:
    numbers = []
    for name in names:
        text = environ[name]
        if not (text.isascii() and text.isdigit()):
            raise UsageError(
                f"{name} is {text!r}, not a number: start with {program}, which sets it"
            )
        numbers.append(int(text))
    return numbers


def _place(
    launcher: str, rank: int, size: int, local_rank: int, local_size: int
) -> RankEnvironment:
    return RankEnvironment(rank, size, local_rank, local_size, launched=True, launcher=launcher)
