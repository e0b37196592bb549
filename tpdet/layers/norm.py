"""A norm of the residual stream.

Placement is data (`ModelConfig.layer_norms`). The exchange that ends a block applies the norm
behind the block, adds to the stream, and applies the norm before the next block.
"""

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.pieces import Pieces
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels.inputs.norm import Norm, norm_weight


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
