"""The torchrun command for one host, as `python -m torch.distributed.run`.

A virtual environment that reuses an installed torch has no `torchrun` script, so the module is
run. The rendezvous takes a free port of its own; ranks meet on the loopback address.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LOOPBACK_ADDRESS = "127.0.0.1"

ENVIRONMENT = (
    ("GLOO_SOCKET_IFNAME", "lo", "ranks of one host need to listen on no other interface"),
    ("NCCL_NVLS_ENABLE", "0", "NVLink multicast adds inside the switch, in no fixed order"),
    ("PYTHONUNBUFFERED", "1", "the last line of standard error must not be lost with the process"),
)
"""(name, value, reason): set for the ranks unless the caller has set them."""


def torchrun_command(
    ranks: int, program: Sequence[str], arguments: Sequence[str], log_folder: Path
) -> list[str]:
    """The command that runs `program` (e.g. ("-m", "tpdet.serve")) as `ranks` ranks.

    `log_folder` takes torchrun's own files, which it would leave in the temporary directory.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        "--standalone",
        f"--local-addr={LOOPBACK_ADDRESS}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        f"--log-dir={log_folder}",
        *program,
        *arguments,
    ]


def rank_environment(ranks: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment to start torchrun in: the caller's, with the table's values where unset.

    OMP_NUM_THREADS, unless set, shares the cores out: max(1, cores // ranks). (torchrun's own
    default is 1.)
    """
    result = dict(os.environ if environ is None else environ)
    cores = len(os.sched_getaffinity(0))
    result.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    for name, value, _ in ENVIRONMENT:
        result.setdefault(name, value)
    return result
