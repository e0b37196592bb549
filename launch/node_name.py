"""What the nodes of a job are called: in errors, so that an operator knows where to look.

A node is called as TPDET_NODE says, else as Slurm's daemon on it is (SLURMD_NODENAME), else by its
host name, which is what MPI calls a processor. It has the launcher's number too (torchrun's
GROUP_RANK, SLURM_NODEID), since containers of several hosts may all be called "localhost".
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpdet.errors import UsageError
from tpdet.launch.node_list import hosts, tasks_on_node
from tpdet.launch.rank_environment import RankEnvironment

NODE_VARIABLE = "TPDET_NODE"
"""Calls this rank's node by another name: where host names tell nothing, and in tests."""
_MAX_CHARACTERS = 64


class Node(NamedTuple):
    """A node's name and its number in the job, from 0."""

    name: str
    number: int


def this_node(place: RankEnvironment, environ: Mapping[str, str] | None = None) -> Node:
    """The node of this process, which has `place`."""
    environ = os.environ if environ is None else environ
    name = environ.get(NODE_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname()
    variable = {"torchrun": "GROUP_RANK", "Slurm": "SLURM_NODEID"}.get(place.launcher, "")
    number = environ.get(variable, "")
    known = number.isascii() and number.isdigit()
    return Node(clean_name(name), int(number) if known else place.rank // place.local_size)


def clean_name(name: str) -> str:
    """A name that can stand in a log line and an error: short, of letters, digits, "._-"."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:_MAX_CHARACTERS] or "unnamed"


def node_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """What to call the node of each rank; nodes that share a name have their number added."""
    numbers: dict[str, dict[int, None]] = {}
    for node in nodes:
        numbers.setdefault(node.name, {})[node.number] = None
    return tuple(
        node.name if len(numbers[node.name]) == 1 else f"{node.name}#{node.number}"
        for node in nodes
    )


def expected_nodes(
    place: RankEnvironment, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The node of each rank as far as the launcher tells before they meet; () if it does not.

    Slurm tells it, of ranks in blocks; and ranks of one host have but one node.
    """
    environ = os.environ if environ is None else environ
    if place.one_host:
        return (this_node(place, environ).name,) * place.size
    nodes, tasks = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if place.launcher != "Slurm" or not nodes or not tasks:
        return ()
    try:
        found = tuple(
            name for at, name in enumerate(hosts(nodes)) for _ in range(tasks_on_node(tasks, at))
        )
    except UsageError:
        return ()
    return found if len(found) == place.size else ()
