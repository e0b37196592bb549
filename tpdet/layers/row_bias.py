"""The bias of a row layer: whole on every rank, and added to the stream before its exchange."""

import torch

from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels.inputs.norm import Finish
from tpdet.layers.partition import Partition


class RowBias:
    """bias [H] in the model's dtype, if the model has such biases (`ModelConfig.row_bias`).

    It is read by `load`, as the layer's weight is.
    """

    values: torch.Tensor | None = None

    def __init__(self, partition: Partition, name: str, outputs: int) -> None:
        self._read = TensorRead(f"{name}.bias", (outputs,), Pieces.whole())
        self._there = partition.config.row_bias

    def load(self, source: WeightSource) -> None:
        """Read it, in place if there is one already."""
        if self._there:
            source.read_for(self._place, self._read)

    def _place(self, values: torch.Tensor) -> None:
        self.values = place(self.values, values)

    def added(self, finish: Finish) -> Finish:
        """The finish with fp32(stream + bias) for its stream."""
        if self.values is None:
            return finish
        return finish._replace(residual=finish.residual + self.values)
