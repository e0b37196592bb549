"""Seconds of the fold over ranks: alpha and beta of both levels.

Inside a host peers write into each other's memory, one-shot for few rows and two-shot for many.
Between nodes every node sends one partial (its slots) to all others, and everyone folds the rest:
whole rows after a one-shot, after a two-shot only those that a rank owns.
"""

from dataclasses import dataclass

import torch

from tpdet.bench.report.floor import sent_bytes
from tpdet.comm.exchange.peer import PROGRAMS_ASIDE
from tpdet.comm.exchange.slot_layout import SlotLayout, by_ranks
from tpdet.kernels.order import fold_plan
from tpdet.planner.constants import Constants, ExchangeCost
from tpdet.planner.hardware import Network


@dataclass(frozen=True)
class Levels:
    """How a world of ranks lies on nodes, and what is sent at each level of its fold.

    local: ranks of a node; nodes: of the world; slots: partials a rank sends inside, node_slots:
    partials a node sends; one_shot_rows: up to so many rows go one-shot.
    """

    local: int
    nodes: int
    slots: int
    node_slots: int
    one_shot_rows: int
    hidden: int

    @property
    def aside(self) -> int:
        """Multiprocessors of an exchange that runs under products."""
        return by_ranks(PROGRAMS_ASIDE, self.local)


def levels_of(
    ranks: int, gpus: int, leaves: int, fold_order: str, hidden: int, rows: int
) -> Levels:
    """ranks: of the world, powers of two; gpus: of a node; rows: the most of a step."""
    local = min(ranks, gpus)
    nodes = -(-ranks // local)
    slots = fold_plan(fold_order, leaves, ranks).slots
    node_slots = fold_plan(fold_order, leaves, nodes).slots
    layout = SlotLayout(max(local, 2), slots, rows, hidden, torch.bfloat16)
    return Levels(local, nodes, slots, node_slots, layout.one_shot_rows, hidden)


def cost_seconds(cost: ExchangeCost, ranks: int, sent: float) -> float:
    """Alpha by ranks, and bytes that leave one of them."""
    return cost.launch + cost.peer * (ranks - 1) + sent / cost.bytes


def exchange_seconds(
    constants: Constants, levels: Levels, rows: int, network: Network
) -> tuple[float, float]:
    """One exchange of `rows` rows with its norm: seconds in a node, and between nodes.

    On one node the runtime's rule chooses the way; over several nodes the faster one is taken. One
    rank of one node exchanges nothing: the reader of its products folds.
    """
    if levels.local == 1:
        return 0.0, between_seconds(constants, levels, rows * levels.hidden, network)
    values = rows * levels.hidden
    one, two = sent_bytes(levels.local, levels.slots, values)
    share = -(-values // levels.local)
    one_shot = (
        cost_seconds(constants.one_shot, levels.local, one),
        between_seconds(constants, levels, values, network),
    )
    two_shot = (
        cost_seconds(constants.two_shot, levels.local, two),
        between_seconds(constants, levels, share, network),
    )
    if levels.nodes > 1:
        return min(one_shot, two_shot, key=sum)
    return one_shot if rows <= levels.one_shot_rows else two_shot


def between_seconds(constants: Constants, levels: Levels, values: int, network: Network) -> float:
    """All nodes' partials of `values` outputs, at each; 0 on one. Alpha as NCCL's in a node."""
    if levels.nodes == 1:
        return 0.0
    sent = (levels.nodes - 1) * values * 4.0 * levels.node_slots
    cost = constants.library_gather
    alpha = cost.launch + cost.peer * (levels.nodes - 1) + network.hop
    return alpha + sent / network.bytes


def aside_seconds(constants: Constants, levels: Levels, rows: int, programs: int) -> float:
    """A two-shot inside a node by a few programs, while products run."""
    two = sent_bytes(levels.local, levels.slots, rows * levels.hidden)[1]
    return two / (constants.aside.program * programs)
