"""Names of a job's nodes, for errors that tell an operator where to look.

A node's name is TPDET_NODE, else Slurm's (SLURMD_NODENAME), else its host name, which is what MPI
calls a processor. Containers of several hosts may all be called "localhost". The launcher's number
of the node then tells them apart (torchrun's GROUP_RANK, SLURM_NODEID). Without such a number it is
the kernel that they run on, its network namespace, and Hydra's name of the host. The node does not
follow from the rank: launchers assign ranks to nodes in any order.
"""

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpdet.errors import UsageError
from tpdet.launch.ranks.node_list import hosts, tasks_on_node
from tpdet.launch.ranks.rank_environment import RankEnvironment

NODE_VARIABLE = "TPDET_NODE"
"""Names this rank's node where host names do not tell nodes apart, and in tests."""
_NUMBER_VARIABLES = {"torchrun": "GROUP_RANK", "Slurm": "SLURM_NODEID"}
_MAX_CHARACTERS = 64
_MAX_LISTED = 16


class Node(NamedTuple):
    """A node's name, and its number in the job from 0; without a number, the machine's identity."""

    name: str
    number: int | None = None
    machine: str = ""


def this_node(rank: RankEnvironment, environ: Mapping[str, str] | None = None) -> Node:
    """The node of this process, which is `rank`."""
    environ = os.environ if environ is None else environ
    name = environ.get(NODE_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname()
    number = environ.get(_NUMBER_VARIABLES.get(rank.launcher, ""), "")
    if number.isascii() and number.isdigit():
        return Node(clean_name(name), int(number))
    return Node(clean_name(name), None, _machine(environ))


def clean_name(name: str) -> str:
    """A name that can stand in a log line and an error: short, of letters, digits, "._-"."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:_MAX_CHARACTERS] or "unnamed"


def node_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """What to call the node of each rank: two ranks have one name if they are on one node.

    A node that shares its name gets its number added, or its position by first rank without one.
    """
    by_name: dict[str, dict[Node, None]] = {}
    for node in nodes:
        by_name.setdefault(node.name, {})[node] = None
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(
        node.name
        if len(by_name[node.name]) == 1
        else f"{node.name}#{numbers[node] if node.number is None else node.number}"
        for node in nodes
    )


def check_places(names: Sequence[str], local_places: Sequence[tuple[int, int]]) -> None:
    """Raise UsageError unless the local ranks of each node are 0 to n - 1, in any order.

    names: of each rank's node, as `node_names`; local_places: each rank's (local rank, local size).
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_of.setdefault(name, []).append(rank)
    for name, ranks in ranks_of.items():
        if sorted(local_places[rank] for rank in ranks) == [
            (i, len(ranks)) for i in range(len(ranks))
        ]:
            continue
        listed = ", ".join(
            f"rank {rank} says local rank {local_places[rank][0]} of {local_places[rank][1]}"
            for rank in ranks[:_MAX_LISTED]
        )
        raise UsageError(
            f"the launcher contradicts itself about node {name}, where {len(ranks)} of "
            f"{len(names)} ranks are: {listed}: a node's local ranks count from 0, each is there "
            "once, and all say how many they are. Start all ranks with one torchrun, srun or "
            f"mpirun; if these are several nodes of one name, set {NODE_VARIABLE} on each"
        )


def expected_nodes(
    rank: RankEnvironment, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The node of each rank, known before the ranks meet; () if the launcher does not state it.

    Slurm states it, unless a file names every task's host. Ranks of one host have one node.
    """
    environ = os.environ if environ is None else environ
    if rank.one_host:
        return (this_node(rank, environ).name,) * rank.size
    nodes, tasks = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if rank.launcher != "Slurm" or not nodes or not tasks:
        return ()
    try:
        names = hosts(nodes)
        counts = [tasks_on_node(tasks, node) for node in range(len(names))]
    except UsageError:
        return ()
    by_rank = _dealt(counts, rank.size, _block_ranks(environ))
    # What this rank knows of itself has to come out, else Slurm dealt in another way.
    fits = by_rank and str(by_rank[rank.rank]) == environ.get("SLURM_NODEID")
    return tuple(names[node] for node in by_rank) if fits else ()


def _block_ranks(environ: Mapping[str, str]) -> int:
    """How many neighbouring ranks Slurm puts on a node before it goes to the next; 0: all."""
    distribution = environ.get("SLURM_DISTRIBUTION", "").partition(":")[0]
    plane = environ.get("SLURM_DIST_PLANESIZE", "")
    if distribution == "plane" and plane.isascii() and plane.isdigit():
        return int(plane)
    return 1 if distribution == "cyclic" else 0


def _dealt(counts: Sequence[int], size: int, together: int) -> tuple[int, ...]:
    """The node of each of `size` ranks, dealt out `together` at a time; () for other counts."""
    if sum(counts) != size:
        return ()
    left, by_rank = list(counts), list[int]()
    while len(by_rank) < size:
        for node, free in enumerate(left):
            taken = min(free, together or free)
            by_rank += [node] * taken
            left[node] -= taken
    return tuple(by_rank)


def _machine(environ: Mapping[str, str]) -> str:
    """The same text for processes of one kernel, network namespace and Hydra host only."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        kernel = network = ""
    facts = f"{kernel} {network} {environ.get('PMI_HOSTNAME', '')}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
