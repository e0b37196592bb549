"""The two parts of a world of several nodes: the ranks of one node, and one rank of each node.

rank                 0 1 2 3 | 4 5 6 7        two nodes of four
inside (of rank 5)             4 5 6 7        rank 1 of 4
across (of rank 5)     1         5            rank 1 of 2, which is the number of the node
"""

import logging
from dataclasses import dataclass

from tpdet.comm.world.roll_call import rank_list
from tpdet.comm.world.world import World

_log = logging.getLogger("tpdet.engine")


@dataclass(frozen=True)
class Nodes:
    """`world` and its parts: `inside` one node, `across` the nodes; all end together."""

    world: World
    inside: World
    across: World


def open_nodes(world: World) -> Nodes | None:
    """The parts of a world of several nodes; None where two levels gain nothing. Collective.

    They gain nothing on one node, and with one rank on each node. They are impossible if nodes
    have different numbers of ranks, or ranks that are not neighbours: then rank 0 logs a warning,
    because answers have the same bits but come slower. The order of a node's local ranks does not
    matter.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(world.node_names):
        ranks_of.setdefault(name, []).append(rank)
    counts = {len(ranks) for ranks in ranks_of.values()}
    if len(ranks_of) == 1 or 1 in counts:
        return None
    in_turn = [rank for ranks in ranks_of.values() for rank in ranks]
    if len(counts) > 1 or in_turn != list(range(world.size)):
        if world.rank == 0:
            _log.warning(
                "nodes do not hold neighbouring ranks, as many on each (%s): sums are exchanged in "
                "one level, which is slower, with the same bits; to fold inside a node first, lay "
                "ranks out in blocks: srun --distribution=block, mpirun --map-by slot (Open MPI) "
                "or -ppn N (MPICH)",
                rank_list(range(world.size), dict(enumerate(world.node_names))),
            )
        return None
    return split_nodes(world, len(ranks_of))


def split_nodes(world: World, nodes: int) -> Nodes:
    """The parts for `nodes` nodes with the same number of neighbouring ranks. Collective."""
    ranks = world.size // nodes
    inside = world.part([range(node * ranks, (node + 1) * ranks) for node in range(nodes)])
    across = world.part([range(local, world.size, ranks) for local in range(ranks)])
    return Nodes(world, inside, across)
