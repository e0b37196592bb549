"""A rank's two worlds in a job of several nodes: the ranks of its node, and its like on the others.

rank                 0 1 2 3 | 4 5 6 7        two nodes of four
inside (of rank 5)             4 5 6 7        rank 1 of 4
across (of rank 5)     1         5            rank 1 of 2, which is the number of the node
"""

import logging
from dataclasses import dataclass

from tpdet.comm.world import World

_log = logging.getLogger("tpdet.engine")


@dataclass(frozen=True)
class Nodes:
    """`world` and its parts: `inside` one node, `across` the nodes; parts live as long as it."""

    world: World
    inside: World
    across: World


def open_nodes(world: World) -> Nodes | None:
    """The parts of a world of several nodes; None where two levels bring nothing. Collective.

    They bring nothing on one node and with one rank a node. They cannot be had if nodes differ in
    their number of ranks or do not hold neighbouring ones: rank 0 logs a warning then, for answers
    are the same, but slower.
    """
    said = f"{world.local_rank} {world.local_size}".encode()
    everyone = world.gather_bytes(said)
    if any(place == b"0 1" for place in everyone) or world.local_size == world.size:
        return None
    ranks = world.local_size
    regular = [f"{rank % ranks} {ranks}".encode() for rank in range(world.size)]
    if everyone != regular:
        if world.rank == 0:
            _log.warning(
                "ranks do not lie node by node, as many on each: their sums are exchanged in one "
                "level, which is slower; (local rank, ranks of the node) by rank: %s",
                ", ".join(f"({place.decode().replace(' ', ', ')})" for place in everyone),
            )
        return None
    return split_nodes(world, world.size // ranks)


def split_nodes(world: World, nodes: int) -> Nodes:
    """Parts for `nodes` nodes of neighbouring ranks, as many on each. Collective."""
    ranks = world.size // nodes
    inside = world.part([range(node * ranks, (node + 1) * ranks) for node in range(nodes)])
    across = world.part([range(local, world.size, ranks) for local in range(ranks)])
    return Nodes(world, inside, across)
