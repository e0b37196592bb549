"""The torchrun command, for one host and for several, as `python -m torch.distributed.run`.

The module is run, because a virtual environment that reuses an installed torch has no `torchrun`
script. Agents meet by torchrun's static rendezvous: node 0's agent opens a store, and nothing is
unpickled. The c10d rendezvous, which --standalone uses too, unpickles what it finds in its store,
and anybody who reaches the store's port may write to it. It is therefore used only on request.
Both stores listen on every address; torchrun has no flag that changes this.
"""

import os
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpdet.errors import ResourceError, UsageError
from tpdet.launch.host.interpreter import SAFE_PATH, python_command
from tpdet.launch.ranks.environment import FIRST_PORT, LOOPBACK_ADDRESS, PORTS
from tpdet.launch.ranks.pinned import fill

STATIC, C10D = "static", "c10d"
"""How agents meet; torchrun's names."""
C10D_WARNING = (
    "--rdzv-backend c10d: torchrun unpickles what it finds in a store that listens on every "
    "address and asks for no password: whoever reaches its port runs code as you; use static, the "
    "default, or keep the port from everybody (docs/cluster.md)"
)
_TRIES = 100


def torchrun_command(
    ranks: int, program: Sequence[str], arguments: Sequence[str], log_folder: Path
) -> list[str]:
    """The command that runs `program` (e.g. ("-m", "tpdet.serve")) as `ranks` ranks on this host.

    torchrun writes its files into `log_folder` instead of the temporary directory.
    """
    return [
        *python_command("-m", "torch.distributed.run"),
        *_static_flags(1, 0, LOOPBACK_ADDRESS, free_port()),
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
    rendezvous: str = STATIC,
) -> list[str]:
    """The command to run on one of `nodes` hosts, for a server with the flags `arguments`.

    endpoint: HOST:PORT of node 0, where the agents meet and which all hosts can reach; if None, on
    one host, a free port of the loopback address. node: the host that the command is for, from 0.
    rendezvous: with C10D the command is the same on all hosts and takes no `node`; the module's
    docstring names its risk. Its agent, once cut off from the others, waits for the store until TCP
    gives up, up to a quarter of an hour after its ranks have ended. Raises UsageError for sizes
    that make no world, and without an endpoint or a node where one is needed.
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
    return [
        *("env", f"{SAFE_PATH}=1"),  # for the ranks, which the agent starts without -P
        *python_command("-m", "torch.distributed.run"),
        *_meeting_flags(nodes, endpoint, node, rendezvous),
        f"--nproc-per-node={ranks_per_node}",
        "--max-restarts=0",
        *("-m", "tpdet.serve"),
        *arguments,
    ]


def free_port() -> int:
    """A port on which nothing listens now, and which Linux gives to no outgoing connection."""
    for port in random.sample(range(FIRST_PORT, FIRST_PORT + PORTS), _TRIES):
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise ResourceError(f"{_TRIES} ports from {FIRST_PORT} on are taken: give --rdzv-endpoint")


def _meeting_flags(
    nodes: int, endpoint: str | None, node: int | None, rendezvous: str
) -> list[str]:
    """Where agents meet: at a store that node 0's agent opens, or by torch's c10d rendezvous."""
    if rendezvous == C10D:
        if node is not None:
            raise UsageError(f"--node-rank {node} with --rdzv-backend c10d: leave one of them out")
        where = endpoint or f"{LOOPBACK_ADDRESS}:0"
        return [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}"]
    if endpoint is None:
        return _static_flags(1, 0, LOOPBACK_ADDRESS, free_port())
    if node is None and nodes > 1:
        raise UsageError(f"--nodes {nodes}: give --node-rank, from 0 for the host of the endpoint")
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--rdzv-endpoint {endpoint!r} is not HOST:PORT, a port from 1 to 65535")
    return _static_flags(nodes, node or 0, host.strip("[]"), int(port))


def _static_flags(nodes: int, node: int, host: str, port: int) -> list[str]:
    return [
        f"--nnodes={nodes}",
        f"--rdzv-backend={STATIC}",
        f"--node-rank={node}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]


def rank_environment(ranks: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment to start torchrun in: the caller's, and `pinned.ENVIRONMENT` where unset.

    OMP_NUM_THREADS, unless set, is max(1, cores // ranks); torchrun would set it to 1.
    """
    result = dict(os.environ if environ is None else environ)
    fill(result, ranks, one_host=True)
    return result
