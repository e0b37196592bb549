"""The torchrun command, for one host and for several, as `python -m torch.distributed.run`.

A virtual environment that reuses an installed torch has no `torchrun` script, so the module is
run. On one host the rendezvous takes a free port of its own, and ranks meet on the loopback
address.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpdet.errors import UsageError
from tpdet.launch.environment import LOOPBACK_ADDRESS
from tpdet.launch.pinned import fill


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


def cluster_command(
    nodes: int,
    ranks_per_node: int,
    endpoint: str | None,
    arguments: Sequence[str],
    node: int | None = None,
) -> list[str]:
    """The command to run on each of `nodes` hosts, for a server with the flags `arguments`.

    endpoint: HOST:PORT of a host that all can reach, where the agents meet; not needed on one host.
    node: which of the hosts the command is for; that of `endpoint` is 0. Without it the command is
    alike on all hosts, but an agent that is cut off from the others can outlive its ranks by a
    quarter of an hour: it waits for the rendezvous' store, and only TCP's own retries end that.
    Raises UsageError for sizes that make no world, and without an endpoint.
    """
    if nodes < 1 or ranks_per_node < 1:
        raise UsageError(f"--nodes {nodes} --ranks-per-node {ranks_per_node}: use 1 or more")
    if nodes > 1 and endpoint is None:
        raise UsageError(
            f"--nodes {nodes} needs --rdzv-endpoint HOST:PORT: one of the hosts, and a free port "
            "of it that the others can reach"
        )
    if node is not None and not 0 <= node < nodes:
        raise UsageError(f"--node-rank {node} of {nodes} nodes: use 0 to {nodes - 1}")
    meeting = ["--standalone", f"--local-addr={LOOPBACK_ADDRESS}"]
    if nodes > 1:
        meeting = [f"--nnodes={nodes}", *_meeting_flags(endpoint or "", node)]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *meeting,
        f"--nproc-per-node={ranks_per_node}",
        "--max-restarts=0",
        *("-m", "tpdet.serve"),
        *arguments,
    ]


def _meeting_flags(endpoint: str, node: int | None) -> list[str]:
    """Where agents meet: at a store that is asked all the time, or, for a `node`, only once."""
    if node is None:
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--rdzv-endpoint {endpoint!r} is not HOST:PORT, which --node-rank needs")
    return [f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"]


def rank_environment(ranks: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment to start torchrun in: the caller's, with the table's values where unset.

    OMP_NUM_THREADS, unless set, shares the cores out: max(1, cores // ranks). (torchrun's own
    default is 1.)
    """
    result = dict(os.environ if environ is None else environ)
    fill(result, ranks, one_host=True)
    return result
