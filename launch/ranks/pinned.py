"""The environment variables that every rank runs with: one table, and its check.

`tpdet.comm.agreement` also compares all settings that may change a bit, over all ranks.
"""

import os
from collections.abc import Mapping, MutableMapping

from tpdet.errors import UsageError
from tpdet.launch.host.interpreter import guard
from tpdet.launch.ranks.rank_environment import RankEnvironment

ENVIRONMENT = (
    ("GLOO_SOCKET_IFNAME", "lo", "ranks of one host need to listen on no other interface"),
    ("NCCL_SOCKET_IFNAME", "lo", "the same of NCCL, which meets there; GPUs talk over NVLink"),
    ("NCCL_NVLS_ENABLE", "0", "NVLink multicast adds inside the switch, in no fixed order"),
    ("PYTHONUNBUFFERED", "1", "the last line of standard error must not be lost with the process"),
)
"""(name, value, reason): set for the ranks unless the caller has set them."""

ONE_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Set only where all ranks are on one host."""
ENFORCED = ("NCCL_NVLS_ENABLE",)
"""Any other value is refused: it would break the arithmetic's contract."""
THREADS = "OMP_NUM_THREADS"


def pin_environment(rank: RankEnvironment, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what the table names and the environment lacks; to be called before torch is imported.

    THREADS, unless set, shares the cores out among the host's ranks. Raises UsageError for a
    value that is enforced and differs.
    """
    environ = os.environ if environ is None else environ
    fill(environ, rank.local_size, rank.one_host)
    check(environ)


def fill(environ: MutableMapping[str, str], local_ranks: int, one_host: bool) -> None:
    """Add the table's values where `environ` has none, and keep the working directory off paths."""
    guard(environ)
    environ.setdefault(THREADS, str(_share_of_cores(local_ranks)))
    for name, value, _ in ENVIRONMENT:
        if one_host or name not in ONE_HOST:
            environ.setdefault(name, value)


def threads_per_rank(local_ranks: int) -> int:
    """Worker threads of one of a host's ranks: what THREADS says, else its share of the cores."""
    named = os.environ.get(THREADS, "")
    return int(named) if named.isdecimal() and int(named) > 0 else _share_of_cores(local_ranks)


def _share_of_cores(local_ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def check(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a value that is enforced and differs."""
    for name, value, reason in ENVIRONMENT:
        setting = environ.get(name, value)
        if name in ENFORCED and setting != value:
            raise UsageError(f"{name} is {setting!r}: it must be {value}, because {reason}")
