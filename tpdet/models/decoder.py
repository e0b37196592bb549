"""The dense decoder of Llama 2/3, Mistral, Qwen2/2.5 and Qwen3.

Shape suffixes: M rows of the step, H hidden, V vocabulary.
"""

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.kernels import ops
from tpdet.kernels.paged_batch import PagedBatch
from tpdet.kernels.rotary import rotary_table
from tpdet.layers.attention import Attention
from tpdet.layers.mlp import GatedMlp
from tpdet.layers.partition import Partition
from tpdet.layers.vocabulary import VocabularyTable
from tpdet.weights.pieces import Pieces
from tpdet.weights.source import WeightSource


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, each added to the residual stream."""

    def __init__(self, source: WeightSource, partition: Partition, index: int) -> None:
        config, name = partition.config, f"model.layers.{index}"
        shape, whole = (config.hidden_size,), Pieces.whole()
        self._eps = config.rms_norm_eps
        self.input_norm = source.read(f"{name}.input_layernorm.weight", shape, whole)
        self._attention = Attention(source, partition, f"{name}.self_attn", config.windows[index])
        self._middle_norm = source.read(f"{name}.post_attention_layernorm.weight", shape, whole)
        self._mlp = GatedMlp(source, partition, f"{name}.mlp")
        self._index = index

    def __call__(
        self,
        hidden_MH: torch.Tensor,
        x_MH: torch.Tensor,
        following_norm: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pages: KeyValuePages,
        batch: PagedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream and its input norm -> residual stream, normed for what follows."""
        hidden_MH, x_MH = self._attention(
            x_MH, hidden_MH, self._middle_norm, rotary, pages.layers[self._index], batch
        )
        return self._mlp(x_MH, hidden_MH, following_norm, self._eps)


class Decoder:
    """Token ids to logits on this rank's share of the weights."""

    def __init__(self, source: WeightSource, partition: Partition, positions: int) -> None:
        """Read every weight; `positions` is how far the rotary table reaches."""
        config = partition.config
        self._eps = config.rms_norm_eps
        self._embedding = VocabularyTable(source, partition, "model.embed_tokens")
        self._layers = [DecoderLayer(source, partition, i) for i in range(config.num_layers)]
        self._norm = source.read("model.norm.weight", (config.hidden_size,), Pieces.whole())
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = VocabularyTable(source, partition, "lm_head")
        self.cos, self.sin = rotary_table(config.rotary, positions, self._norm.device)

    def hidden(
        self,
        ids_M: torch.Tensor,
        pages: KeyValuePages,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Run the layers over a step's rows, storing their keys and values; -> [M, H], normed."""
        rotary = (self.cos[batch.positions], self.sin[batch.positions])
        hidden_MH = self._embedding.embed(ids_M)
        x_MH = ops.rms_norm(hidden_MH, self._layers[0].input_norm, self._eps)
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for layer, norm in zip(self._layers, norms, strict=True):
            hidden_MH, x_MH = layer(hidden_MH, x_MH, norm, rotary, pages, batch)
        return x_MH

    def logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Normed rows [M, H] -> fp32 logits [M, V], equal on every rank."""
        return self._head.logits(x_MH)
