"""The two ways of cutting row layers (attention output, down) over ranks, by their names.

Each way is a class that owns its shard rule, its loading and its exchange. No other code depends on
which one is in use.
"""

from typing import Protocol

import torch

from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending, RankExchange
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import Leaves
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.gathered_linear import GatheredLinear
from tpdet.layers.linear import RowLinear
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct


class RowLayer(Protocol):
    """A layer whose result goes to the residual stream and to the norm that follows."""

    def __call__(self, x_MK: torch.Tensor, rows: MicroBatch, finish: Finish) -> Pending:
        """This rank's columns x [M, K'] -> what becomes of y: the stream and its norm."""

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on, where the rule has more than one."""


class RowLayers(Protocol):
    """How such layers are cut: what both classes offer."""

    def __call__(
        self, source: WeightSource, partition: Partition, name: str, outputs: int, cut: Leaves
    ) -> RowLayer:
        """Load a layer of `outputs` outputs; cut: its inputs' leaves."""

    def product(self, partition: Partition, name: str, outputs: int, cut: Leaves) -> LayerProduct:
        """A layer's product on this rank."""

    def open_exchange(
        self,
        transport: str,
        partition: Partition,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RankExchange:
        """The exchange that its layers need, for steps of up to `rows` rows. Collective."""


_RULES: dict[str, RowLayers] = {"fold": RowLinear, "gather": GatheredLinear}


def row_rule(partition: Partition) -> RowLayers:
    """The rule of a partition's row layers."""
    return _RULES[partition.row_layers]


def row_linear(
    source: WeightSource, partition: Partition, name: str, outputs: int, cut: Leaves
) -> RowLayer:
    """Load a row layer by the partition's rule; cut: its inputs' leaves."""
    return row_rule(partition)(source, partition, name, outputs, cut)
