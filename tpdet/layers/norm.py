"""A norm of the residual stream, and what a norm behind a block does to the block's output.

Placement is data (`ModelConfig.layer_norms`). A norm *before* a block is in the exchange of the
block that precedes it. A norm *after* a block is in that block's own exchange, which gets no
residual stream then: its normed rows are what `NormedBlock` adds to the stream.
"""

from dataclasses import dataclass

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.pieces import Pieces
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Norm, norm_weight
from tpdet.kernels.partial_sums import PartialSums


class NormLayer:
    """A norm over the hidden size, read from a checkpoint; every rank has the whole of it."""

    def __init__(self, source: WeightSource, config: ModelConfig, name: str) -> None:
        self._name, self._shape, self._kind = name, (config.hidden_size,), config.norm
        rows: torch.dtype = getattr(torch, config.dtype)
        self.norm = Norm(self._read(source), config.rms_norm_eps, self._kind, rows)

    def load(self, source: WeightSource) -> None:
        """Read the weight again, in place."""
        place(self.norm.weight, self._read(source))

    def _read(self, source: WeightSource) -> torch.Tensor:
        parts = ("weight", "bias") if self._kind == "layer" else ("weight",)
        whole = Pieces.whole()
        read = [source.read(f"{self._name}.{part}", self._shape, whole) for part in parts]
        return norm_weight(self._kind, *read)


@dataclass(frozen=True)
class NormedBlock:
    """A block's exchange that was begun without the stream, whose rows are added to it when done.

    block: its y is the block's normed output [M, H]; stream: fp32 [M, H]; following: the norm
    before the next block, None where that reads the stream itself.
    """

    block: Pending
    stream: torch.Tensor
    following: Norm | None

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, x): h = fp32(stream + y); x = the following norm of h, or h rounded to y's dtype."""
        _, y_MH = self.block.result()
        if self.following is None:
            h_MH = ops.add_residual(y_MH, self.stream)
            return h_MH, h_MH.to(y_MH.dtype)
        return ops.fold_and_norm(PartialSums(y_MH[None], (0,)), None, self.stream, self.following)
