"""What stands in the output head's place where no text is made: a score head, or nothing."""

import torch

from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.partition import Partition


class PoolingHead:
    """Labels of rows by `score.weight` [labels, H], whole on every rank; without labels the rows.

    It has the methods of `VocabularyTable` that a head needs.
    """

    def __init__(self, source: WeightSource, partition: Partition) -> None:
        config = partition.config
        self._arithmetic = partition.arithmetic
        shape = config.labels, config.hidden_size
        self._reads = [TensorRead("score.weight", shape, Pieces.whole())] if config.labels else []
        self._weight_NH = [*source.read_all(self._reads)]

    def load(self, source: WeightSource) -> None:
        """Read the weight again, in place."""
        for read, weight_NH in zip(self._reads, self._weight_NH, strict=True):
            source.read_for(lambda read_NH, weight=weight_NH: place(weight, read_NH), read)

    def local_logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """x [M, H] -> fp32 labels [M, labels], each one chain that is not rounded; or x in fp32."""
        for weight_NH in self._weight_NH:
            return self._arithmetic.column(x_MH, weight_NH, out_dtype=torch.float32)
        return x_MH.float()

    def whole_logits(self, local_MV: torch.Tensor) -> torch.Tensor:
        """The same: every rank has all columns."""
        return local_MV

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic
