"""Vocabulary-parallel embedding and output head: rows of the vocabulary cut over ranks."""

import torch

from tpdet.kernels import ops
from tpdet.layers.partition import Partition
from tpdet.weights.source import WeightSource


class VocabularyTable:
    """One [vocabulary, hidden] matrix, cut over ranks; serves as embedding, head, or both."""

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config = partition.config
        rows_VH = source.read(
            f"{name}.weight", (config.vocab_size, config.hidden_size), partition.by_vocabulary()
        )
        share = partition.vocabulary_share * len(partition.mine)
        self.table_VH = rows_VH.new_zeros(share, config.hidden_size)
        self.table_VH[: rows_VH.shape[0]] = rows_VH
        self._partition = partition

    def embed(self, ids_M: torch.Tensor) -> torch.Tensor:
        """ids [M] -> [M, H]: each row is moved from the rank that owns it; nothing is added."""
        share, world = self.table_VH.shape[0], self._partition.world
        first = world.rank * share
        local = (ids_M - first).clamp(0, share - 1)
        rows_MH = ops.embed(local, self.table_VH)
        if world.size == 1:
            return rows_MH
        everyone = world.all_gather(rows_MH)
        return everyone[ids_M // share, torch.arange(len(ids_M), device=ids_M.device)]

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] -> fp32 logits over the whole vocabulary [M, V], on every rank."""
        world = self._partition.world
        local_MV = ops.column_gemm(hidden_MH, self.table_VH, out_dtype=torch.float32)
        whole = world.all_gather(local_MV).permute(1, 0, 2).reshape(len(hidden_MH), -1)
        return whole[:, : self._partition.config.vocab_size].contiguous()
