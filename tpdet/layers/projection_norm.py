"""The norm of a whole projection: all query heads of a row at once, and all key heads (OLMo-2).

Ranks hold parts of a row. They gather its largest |x|, then the integer sums of squares that its
exponent scales: a maximum and a sum of integers have no order, so every rank has the bits of one.
Heads of zeros that pad a rank add nothing; a key head that neighbours share counts once.
"""

import torch

from tpdet.checkpoint.source import WeightSource
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Norm
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import ColumnPart, read_parts
from tpdet.layers.partition import Partition


class ProjectionNorm:
    """Norms of queries and of keys, their weights cut as the heads are."""

    def __init__(
        self, source: WeightSource, partition: Partition, parts: tuple[ColumnPart, ColumnPart]
    ) -> None:
        """parts: the weights of queries and keys, one value a row of the projection."""
        config, self._parts = partition.config, parts
        self._arithmetic, self._ranks = partition.arithmetic, partition.world.size
        skipped = len(partition.key_heads) - partition.first_read_key_heads
        self._counted = 0, skipped * config.head_dim
        rows: torch.dtype = getattr(torch, config.dtype)
        self._norms = [
            Norm(read_parts(source, [part], None, "weight"), config.rms_norm_eps, rows=rows)
            for part in parts
        ]

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        for part, norm in zip(self._parts, self._norms, strict=True):
            read_parts(source, [part], norm.weight, "weight")

    def __call__(self, q_MN: torch.Tensor, k_MN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's queries and keys [M, heads * D] -> both normed, in the model's dtype."""
        both = q_MN, k_MN
        counted = [x[:, first:] for x, first in zip(both, self._counted, strict=True)]
        largest = self._gathered([ops.row_largest(x) for x in counted]).amax(0)
        masses = [ops.row_mass(x, each) for x, each in zip(counted, largest, strict=True)]
        mass = self._gathered(masses).sum(0)
        q, k = (
            ops.norm_by_mass(x, largest[i], mass[i], self._parts[i].rows, self._norms[i])
            for i, x in enumerate(both)
        )
        return q, k

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Exchange by this from now on."""
        self._arithmetic = arithmetic

    def _gathered(self, values: list[torch.Tensor]) -> torch.Tensor:
        """[M] of queries and of keys -> [ranks, 2, M]."""
        own = torch.stack(values)
        return own[None] if self._ranks == 1 else self._arithmetic.exchange.carrier.all_gather(own)
