"""Predicts the seconds of the fold over ranks, inside a node and between nodes.

Inside a node peers write into each other's memory, one-shot for few rows and two-shot for many.
Between nodes every node sends its partials (its slots) to all others, and each rank folds them:
whole rows after a one-shot, only the rows it owns after a two-shot.
"""

from dataclasses import dataclass

import torch

from tpdet.comm.exchange.peer import OVERLAP_PROGRAMS
from tpdet.comm.exchange.slot_layout import SlotLayout, by_ranks
from tpdet.kernels.order import fold_plan
from tpdet.tools.measurement.floor import sent_bytes
from tpdet.tools.plan.constants import Constants
from tpdet.tools.plan.hardware import Network


@dataclass(frozen=True)
class Levels:
    """The layout of a world on nodes, and the partials sent at each level of its fold.

    local: ranks of a node; nodes: of the world; slots: partials that a rank sends inside a node;
    node_slots: partials that a node sends; one_shot_rows: the most rows of a one-shot exchange.
    """

    local: int
    nodes: int
    slots: int
    node_slots: int
    one_shot_rows: int
    hidden: int

    @property
    def overlapped(self) -> int:
        """Multiprocessors of an exchange that overlaps products."""
        return by_ranks(OVERLAP_PROGRAMS, self.local)


def levels_of(
    ranks: int, gpus: int, leaves: int, fold_order: str, hidden: int, rows: int
) -> Levels:
    """The levels of a world of `ranks`, a power of two; gpus: of a node; rows: of a step."""
    local = min(ranks, gpus)
    nodes = -(-ranks // local)
    slots = fold_plan(fold_order, leaves, ranks).slots
    node_slots = fold_plan(fold_order, leaves, nodes).slots
    layout = SlotLayout(max(local, 2), slots, rows, hidden, torch.bfloat16)
    return Levels(local, nodes, slots, node_slots, layout.one_shot_rows, hidden)


def exchange_seconds(
    constants: Constants, levels: Levels, rows: int, network: Network
) -> tuple[float, float]:
    """One exchange of `rows` rows with its norm: seconds in a node, and between nodes.

    On one node the runtime's rule chooses the kind of exchange; over several nodes the faster kind
    counts. A single rank exchanges nothing: its products' reader folds.
    """
    if levels.local == 1:
        return 0.0, between_seconds(constants, levels, rows * levels.hidden, network)
    values = rows * levels.hidden
    one, two = sent_bytes(levels.local, levels.slots, values)
    share = -(-values // levels.local)
    one_shot = (
        constants.one_shot.seconds(levels.local, one),
        between_seconds(constants, levels, values, network),
    )
    two_shot = (
        constants.two_shot.seconds(levels.local, two),
        between_seconds(constants, levels, share, network),
    )
    if levels.nodes > 1:
        return min(one_shot, two_shot, key=sum)
    return one_shot if rows <= levels.one_shot_rows else two_shot


def between_seconds(constants: Constants, levels: Levels, values: int, network: Network) -> float:
    """Seconds until each node has all partials of `values` outputs; latency as NCCL's in a node."""
    if levels.nodes == 1:
        return 0.0
    sent = (levels.nodes - 1) * values * 4.0 * levels.node_slots
    cost = constants.library_gather
    alpha = cost.launch + cost.peer * (levels.nodes - 1) + network.hop
    return alpha + sent / network.bytes


def overlapped_seconds(constants: Constants, levels: Levels, rows: int, programs: int) -> float:
    """Seconds of a two-shot exchange inside a node by `programs`, while products run."""
    two = sent_bytes(levels.local, levels.slots, rows * levels.hidden)[1]
    return two / (constants.overlapped.program * programs)
