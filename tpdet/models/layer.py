"""The decoder layer of Llama 2/3, Mistral, Qwen2/2.5 and Qwen3: a norm before each block."""

from typing import ClassVar

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels.inputs.norm import Norm
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.attention import Attention
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.mlp import GatedMlp
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.model_config import ModelConfig
from tpdet.weights.pieces import Pieces
from tpdet.weights.place import place
from tpdet.weights.source import WeightSource


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, each added to the residual stream."""

    blocks: ClassVar[dict[str, type[Attention] | type[GatedMlp]]] = {
        "self_attn": Attention,
        "mlp": GatedMlp,
    }
    """By their names in the checkpoint, in the order of a step."""

    def __init__(self, source: WeightSource, partition: Partition, index: int) -> None:
        config, name = partition.config, f"model.layers.{index}"
        shape, whole = (config.hidden_size,), Pieces.whole()
        eps = config.rms_norm_eps
        self._norms = [f"{name}.{n}_layernorm.weight" for n in ("input", "post_attention")]
        self.input_norm = Norm(source.read(self._norms[0], shape, whole), eps)
        self._attention = Attention(source, partition, f"{name}.self_attn", config.windows[index])
        self._middle_norm = Norm(source.read(self._norms[1], shape, whole), eps)
        self._mlp = GatedMlp(source, partition, f"{name}.mlp")
        self._index = index

    @classmethod
    def products(cls, partition: Partition) -> tuple[LayerProduct, ...]:
        """The layer's products, as this rank holds them."""
        return tuple(each for block in cls.blocks.values() for each in block.products(partition))

    @classmethod
    def sized_tensors(cls, config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes of tensors of layer `index` in which its sizes occur."""
        found: dict[str, tuple[int, ...]] = {}
        for name, block in cls.blocks.items():
            found |= block.sized_tensors(config, f"model.layers.{index}.{name}")
        return found

    @classmethod
    def norm_values(cls, config: ModelConfig) -> int:
        """Values of the layer's norms; every rank holds all of them."""
        inside = sum(block.norm_values(config) for block in cls.blocks.values())
        return 2 * config.hidden_size + inside

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        for name, held in zip(self._norms, (self.input_norm, self._middle_norm), strict=True):
            place(held.weight, source.read(name, tuple(held.weight.shape), Pieces.whole()))
        self._attention.load(source)
        self._mlp.load(source)

    def attend(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], pages: KeyValuePages
    ) -> Pending:
        """Attention on the rows' x; the stream comes back normed for the feed-forward block."""
        return self._attention(rows, self._middle_norm, rotary, pages.layers[self._index])

    def feed(self, rows: MicroBatch, following: Norm) -> Pending:
        """The feed-forward block; the stream comes back normed for what follows."""
        return self._mlp(rows, following)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._attention.adopt(arithmetic)
        self._mlp.adopt(arithmetic)
