"""Vocabulary-parallel embedding and output head: rows of the vocabulary cut over ranks."""

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.pieces import TensorRead
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels import ops
from tpdet.kernels.inputs.product import Product
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct


class VocabularyTable:
    """One [vocabulary, hidden] matrix, cut over ranks; serves as embedding, head, or both."""

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config = partition.config
        self._partition = partition
        shape = config.vocab_size, config.hidden_size
        self._read = TensorRead(f"{name}.weight", shape, partition.by_vocabulary())
        rows_VH = source.read(*self._read)
        share = partition.vocabulary_share * len(partition.mine)
        self._arithmetic = partition.arithmetic
        memory = partition.exchange.carrier.memory
        self._parts = None
        if memory is not None:
            self._parts = memory.allocate((share, config.hidden_size), rows_VH.dtype)
        self.table_VH = (
            rows_VH.new_empty(share, config.hidden_size) if self._parts is None else self._parts.own
        )
        self._fill(rows_VH)
        if memory is not None:
            memory.settle()  # from here on anyone may read

    @staticmethod
    def product(partition: Partition) -> LayerProduct:
        """The output head's, as this rank holds it."""
        rows = partition.vocabulary_share * len(partition.mine)
        return LayerProduct("head", Product("head", rows, partition.config.hidden_size))

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shape of the table."""
        return {f"{name}.weight": (config.vocab_size, config.hidden_size)}

    def load(self, source: WeightSource) -> None:
        """Read the rows again, in place. No rank may read them before all ranks have done so."""
        rows = self._read.held[0]
        source.read_into([self._read], [self.table_VH[:rows]])
        self.table_VH[rows:] = 0

    def _fill(self, rows_VH: torch.Tensor) -> None:
        self.table_VH[: rows_VH.shape[0]] = rows_VH
        self.table_VH[rows_VH.shape[0] :] = 0

    def embed(self, ids_M: torch.Tensor) -> torch.Tensor:
        """ids [M] -> fp32 [M, H]: rows move from the ranks that own them; nothing is added."""
        if self._parts is not None:
            return self._parts.rows(ids_M)
        share, world = self.table_VH.shape[0], self._partition.world
        if world.size == 1:
            return ops.embed(ids_M, self.table_VH)
        local = (ids_M - world.rank * share).clamp(0, share - 1)
        everyone = world.all_gather(self.table_VH.index_select(0, local))
        return everyone[ids_M // share, torch.arange(len(ids_M), device=ids_M.device)].float()

    def local_logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """x [M, H] -> fp32 logits of this rank's ids [M, V'], its padding's at the end."""
        return self._arithmetic.column(x_MH, self.table_VH, out_dtype=torch.float32)

    def whole_logits(self, local_MV: torch.Tensor) -> torch.Tensor:
        """Every rank's `local_logits` -> fp32 logits over the whole vocabulary [M, V]."""
        world, size = self._partition.world, self._partition.config.vocab_size
        if world.size > 1:
            local_MV = world.all_gather(local_MV).permute(1, 0, 2).reshape(len(local_MV), -1)
        return local_MV[:, :size].contiguous()

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic
