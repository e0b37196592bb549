"""A norm of the residual stream.

Placement is data (`ModelConfig.layer_norms`). The exchange that ends a block applies the norm
behind the block, adds to the stream, and applies the norm before the next block.
"""

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels.inputs.norm import Norm, norm_weight


class NormLayer:
    """A norm over the hidden size, read from a checkpoint; every rank has the whole of it."""

    def __init__(self, source: WeightSource, config: ModelConfig, name: str) -> None:
        self._kind, shape = config.norm, (config.hidden_size,)
        parts = ("weight", "bias") if self._kind == "layer" else ("weight",)
        self._reads = [TensorRead(f"{name}.{part}", shape, Pieces.whole()) for part in parts]
        rows: torch.dtype = getattr(torch, config.dtype)
        weight = norm_weight(self._kind, *source.read_all(self._reads))
        self.norm = Norm(weight, config.rms_norm_eps, self._kind, rows)

    def load(self, source: WeightSource) -> None:
        """Read the weight again, in place."""
        source.read_for(self._place, *self._reads)

    def _place(self, *read: torch.Tensor) -> None:
        place(self.norm.weight, norm_weight(self._kind, *read))
