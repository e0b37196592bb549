"""Gated feed-forward block: gate and up cut by columns, down by rows."""

import torch

from tpdet.kernels import ops
from tpdet.layers.linear import ColumnLinear, RowLinear
from tpdet.layers.partition import Partition
from tpdet.weights.source import WeightSource


class GatedMlp:
    """down(silu(gate(x)) * up(x)), its last product folded in fp32 and added to the stream."""

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        hidden, width = partition.config.hidden_size, partition.config.intermediate_size
        cut = partition.by_leaf(width, dim=0)
        parts = [(f"{name}.gate_proj", width, cut), (f"{name}.up_proj", width, cut)]
        self._gate_up = ColumnLinear(source, parts, hidden, bias=False)
        self._down = RowLinear(source, partition, f"{name}.down_proj", (hidden, width))

    def __call__(
        self, x_MH: torch.Tensor, hidden_MH: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the residual stream [M, H] -> the stream with the block's result, and its norm."""
        mixed = ops.silu_and_multiply(self._gate_up(x_MH))
        return self._down(mixed, hidden_MH, norm_weight, eps)
