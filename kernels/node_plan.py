"""A fold plan in two levels: inside a node first, then between nodes; the expression is the same.

    ranks  --roots of a rank-->  their node: folds what lies wholly inside it
    nodes  --roots of a node-->  every node: evaluates the rest

Standard library only. Nothing is decided here: the expression is `FoldPlan.final`, cut once more
where it crosses from node to node.
"""

from dataclasses import dataclass
from functools import cache

from tpdet.kernels.order import FinalExpression, FoldPlan, Slot, operands, substitute


@dataclass(frozen=True)
class NodePlan:
    """How `nodes` nodes of `ranks` ranks each evaluate one fold tree together.

    A rank sends `slots` partials inside its node, as in one level. `inside[n]` are the largest
    subtrees wholly inside node n, over slots whose rank is local (0 .. ranks - 1); the node sends
    them in this order. `across` is the rest, over slots whose rank is a node.
    """

    nodes: int
    ranks: int
    slots: int
    inside: tuple[tuple[FinalExpression, ...], ...]
    across: FinalExpression

    @property
    def sent(self) -> int:
        """Partials between nodes: the largest number that any node sends."""
        return max(len(roots) for roots in self.inside)


@cache
def node_plan(plan: FoldPlan, nodes: int) -> NodePlan:
    """`plan` over `nodes` nodes of neighbouring ranks.

    Raises ValueError if the nodes do not divide the ranks, or if a node's leaves are not one whole
    stretch of the tree (then it would hold no whole subtrees).
    """
    size = len(plan.roots)
    if nodes < 1 or size % nodes:
        raise ValueError(f"{size} ranks on {nodes} nodes: every node needs as many as the others")
    ranks = size // nodes
    _check_leaves(plan, nodes)
    sent: list[list[FinalExpression]] = [[] for _ in range(nodes)]

    def cut(part: FinalExpression) -> FinalExpression:
        holders = {slot.rank // ranks for slot in operands(part)}
        if len(holders) == 1:
            (node,) = holders
            sent[node].append(substitute(part, lambda slot: Slot(slot.rank % ranks, slot.index)))
            return Slot(node, len(sent[node]) - 1)
        assert not isinstance(part, Slot)  # a rank lies in one node
        return cut(part[0]), cut(part[1])

    across = cut(plan.final)
    return NodePlan(nodes, ranks, plan.slots, tuple(tuple(roots) for roots in sent), across)


def _check_leaves(plan: FoldPlan, nodes: int) -> None:
    ranks, share = len(plan.roots) // nodes, plan.leaves // nodes
    by_rank = [[leaf for root in roots for leaf in operands(root)] for roots in plan.roots]
    present = sorted(leaf for held in by_rank for leaf in held)
    for node in range(nodes):
        held = [leaf for rank in by_rank[node * ranks : (node + 1) * ranks] for leaf in rank]
        if held != [leaf for leaf in present if leaf // share == node]:
            raise ValueError(
                f"node {node} of {nodes} holds leaves {held} of {plan.leaves}, which are no whole "
                "subtrees: give neighbouring leaves to the ranks of a node"
            )
