"""The exchange of the approximate mode: a library's all-reduce in the model's dtype.

The carrier of the deterministic exchange goes on moving bytes (the embedding's rows, small gathers)
and watching for lost peers, so the two modes differ in arithmetic alone.
"""

import torch

from tpdet.comm.exchange.carrier import Carrier
from tpdet.comm.exchange.fold import InLine
from tpdet.comm.world.world import World
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums


class AllReduceExchange(InLine):
    """Sums of all ranks by `World.add_in_any_order`; then residual and norm in one kernel.

    As in stock engines, the all-reduce stands in line with the products.
    """

    def __init__(self, world: World, carrier: Carrier) -> None:
        """carrier: of the deterministic exchange."""
        self.carrier = carrier
        self._world = world

    def fold_and_norm(
        self, sums: PartialSums, finish: Finish, plan: FoldPlan | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's one product [1, M, H] in the model's dtype -> (h, y), whole on every rank."""
        total = self._world.add_in_any_order(sums.values)
        return ops.fold_and_norm(PartialSums(total, (0,)), finish)
