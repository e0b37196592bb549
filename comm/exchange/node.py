"""The fixed-order reduction in two levels, for ranks on several nodes: same expression, same bits.

    few rows    roots of the ranks to everyone in the node, who folds them into the node's roots;
                these to the like rank of every other node, who folds the rest
    many rows   roots of rows [l * share, ...) to local rank l of the node, share = ceil(M / ranks);
                it folds them, exchanges the node's roots of these rows with its like on the other
                nodes, folds the rest, and gives the sums to everyone in the node

So between nodes travels what a node has folded, not what every rank has; of many rows, each of
them once from node to node. Inside a node few rows go over peer memory where there is some.
"""

import torch

from tpdet.comm.exchange.carrier import NodeCarrier
from tpdet.comm.exchange.fold import TWO_SHOT_ROWS, GatherExchange
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.comm.world.nodes import Nodes
from tpdet.kernels import ops
from tpdet.kernels.node_plan import NodePlan, node_plan
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums, gathered_sums, whole_sum


class NodeExchange(GatherExchange):
    """All-gathers and an all-to-all of the parts; what moves no sums is the whole world's.

    peers: carries few rows inside the node, over its peer memory, in place of its world.
    """

    def __init__(
        self,
        plan: FoldPlan,
        nodes: Nodes,
        peers: PeerColumns | None = None,
        sliced_rows: int = TWO_SHOT_ROWS,
    ) -> None:
        """plan: of all ranks in one level; sliced_rows: the fewest that are sliced."""
        super().__init__(plan, nodes.world, sliced_rows)
        if peers is not None:
            self.carrier = NodeCarrier(nodes.world, peers.carrier)
        self._sliced_rows = sliced_rows
        self._nodes = nodes
        node_plan(plan, nodes.across.size)  # refused now if the nodes hold no whole subtrees
        self._peers = peers

    def everyones(self, sums: PartialSums, plan: FoldPlan | None = None) -> PartialSums:
        """The sums of all ranks under one root, equal on every rank."""
        levels = node_plan(self._plan if plan is None else plan, self._nodes.across.size)
        sent = ops.fold_roots(sums, levels.slots)
        if sent.shape[1] < self._sliced_rows:
            return self._across(self._gathered_inside(sent), levels)
        return whole_sum(self._sliced(sent, levels))

    def _gathered_inside(self, sent: torch.Tensor) -> torch.Tensor:
        """Roots [slots, M, N] -> those of the node's ranks [ranks, slots, M, N]."""
        if self._peers is None or sent.numel() == 0:
            return self._nodes.inside.all_gather(sent)
        # Row by row: the kernel is compiled for a width, which must not depend on the rows.
        columns = sent.shape[-1]
        whole = self._peers.gather_columns(sent.view(-1, columns))
        by_rank = whole.view(len(whole), -1, columns).transpose(0, 1).contiguous()
        return by_rank.view(-1, *sent.shape)

    def _across(self, inside: torch.Tensor, levels: NodePlan) -> PartialSums:
        """Roots of the node's ranks [ranks, slots, M, N] -> all nodes' roots, under one."""
        across = self._nodes.across
        mine = ops.fold_roots(gathered_sums(inside, *levels.inside[across.rank]), levels.sent)
        return gathered_sums(across.all_gather(mine), levels.across)

    def _sliced(self, sent: torch.Tensor, levels: NodePlan) -> torch.Tensor:
        """Roots [slots, M, N] -> [M, N]; blocks are of one size, padded with any bits."""
        inside, (slots, rows, columns) = self._nodes.inside, sent.shape
        share = -(-rows // inside.size)
        padded = sent
        if share * inside.size != rows:
            padded = sent.new_zeros(slots, share * inside.size, columns)
            padded[:, :rows] = sent
        blocks = padded.view(slots, inside.size, share, columns).transpose(0, 1).contiguous()
        total = ops.fold_roots(self._across(inside.all_to_all(blocks), levels), 1)[0]
        return inside.all_gather(total).view(-1, columns)[:rows]
