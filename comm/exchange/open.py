"""Which exchange of sums a world gets: by its transport, its peer memory and its nodes."""

import torch

from tpdet.comm.exchange.fold import TWO_SHOT_ROWS, Exchange, GatherExchange
from tpdet.comm.exchange.node import NodeExchange
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.comm.exchange.peer_memory import memory_for
from tpdet.comm.world.nodes import Nodes, open_nodes
from tpdet.comm.world.world import World
from tpdet.kernels.order import FoldPlan, Slot


def open_exchange(
    transport: str,
    plan: FoldPlan,
    world: World,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    """The exchange for a transport: "gather", "peer", or "auto": peer memory where there is some.

    rows: the most of a step. On several nodes it is one of two levels, and peer memory a node's.
    Collective. Raises UsageError when "peer" cannot be had.
    """
    nodes = open_nodes(world)
    if nodes is not None:
        return open_node_exchange(transport, plan, nodes, rows, hidden, device)
    memory = memory_for(transport, world, device)
    if memory is None or isinstance(plan.final, Slot):
        return GatherExchange(plan, world)
    return PeerExchange(plan, memory, rows, hidden, dtype)


def open_node_exchange(
    transport: str, plan: FoldPlan, nodes: Nodes, rows: int, hidden: int, device: torch.device
) -> NodeExchange:
    """The exchange in two levels; see `open_exchange`. Collective."""
    memory = memory_for(transport, nodes.inside, device)
    # A node without peer memory beside one with it is right, and as slow as both without.
    if memory is None:
        return NodeExchange(plan, nodes)
    few = plan.slots * min(rows, TWO_SHOT_ROWS - 1)
    widths = nodes.inside.size * hidden, hidden
    peers = PeerColumns(memory, few, widths, torch.float32)
    return NodeExchange(plan, nodes, peers)
