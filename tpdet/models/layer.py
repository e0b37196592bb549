"""The decoder layer of all families: attention and feed-forward, norms before or after each."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from tpdet.cache.kv import LayerCache
from tpdet.checkpoint.model_config import FAMILIES, ModelConfig
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.attention import Attention
from tpdet.layers.experts import ExpertMlp
from tpdet.layers.linear_attention import DeltaNet
from tpdet.layers.micro_batch import MicroBatch, Projected
from tpdet.layers.mlp import GatedMlp, PlainMlp
from tpdet.layers.norm import NormLayer
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct

Mixer: TypeAlias = type[Attention] | type[DeltaNet]
FeedForward: TypeAlias = type[GatedMlp] | type[PlainMlp] | type[ExpertMlp]
_WITHOUT_GATES = {family.name for family in FAMILIES.values() if not family.gated}


def mixer(config: ModelConfig, index: int) -> tuple[str, Mixer]:
    """The name in the checkpoint, and the kind, of what mixes the tokens in layer `index`."""
    return ("linear_attn", DeltaNet) if config.is_linear(index) else ("self_attn", Attention)


def feed_forward(config: ModelConfig, index: int) -> tuple[str, FeedForward]:
    """The name in the checkpoint, and the kind, of the feed-forward block of layer `index`."""
    if config.mixture is not None and config.has_experts(index):
        return config.mixture.block, ExpertMlp
    return "mlp", PlainMlp if config.family in _WITHOUT_GATES else GatedMlp


class BlockNorms(NamedTuple):
    """The norms of a layer, as `ModelConfig.layer_norms` places them; None where there is none."""

    before_attention: Norm | None
    behind_attention: Norm | None
    before_mlp: Norm | None
    behind_mlp: Norm | None


class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream.

    A block without a norm before it reads the stream rounded to the model's dtype.
    """

    def __init__(self, source: WeightSource, partition: Partition, index: int) -> None:
        config, name = partition.config, f"model.layers.{index}"
        if config.row_bias and any(config.layer_norms[1::2]):
            raise ValueError(f"{config.family}: a biased row layer has no norm behind it")
        read = [
            NormLayer(source, config, f"{name}.{norm}") if norm else None
            for norm in config.layer_norms
        ]
        self._read_norms = [norm for norm in read if norm is not None]
        self.norms = BlockNorms(*(None if norm is None else norm.norm for norm in read))
        block, mixing = mixer(config, index)
        self._attention = mixing(source, partition, f"{name}.{block}", index)
        block, kind = feed_forward(config, index)
        self._mlp = kind(source, partition, f"{name}.{block}")
        self.index = index

    def forward(
        self,
        parts: Sequence[MicroBatch],
        following: Norm | None,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pages: LayerCache,
    ) -> None:
        """h = h + attention(norm(h)), then h = h + mlp(norm(h)), over parts of a step's rows.

        A part's x is the norm of its h. What adds a block to h norms it for the block that comes
        `following`, and may run while other parts compute: it is waited for where x is read.
        """
        for rows in parts:
            rows.settle()
            self.attend(self.project(rows, rotary, pages), rows, pages)
        for rows in parts:
            rows.settle()
            self.feed(rows, following)

    def project(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], pages: LayerCache
    ) -> Projected:
        """The rows' x -> what `attend` reads; keys and values, or states, are stored.

        Of a linear layer: its rows [M, Hv, Dv]; the states have moved.
        """
        return self._attention.project(rows, rotary, pages)

    def attend(self, projected: Projected, rows: MicroBatch, pages: LayerCache) -> None:
        """Begin to add attention to the stream of rows, which may be some of those projected."""
        finish = Finish(rows.hidden_MH, self.norms.before_mlp, self.norms.behind_attention)
        rows.pending = self._attention.attend(projected, rows, finish, pages)

    def feed(self, rows: MicroBatch, following: Norm | None) -> None:
        """Begin to add the feed-forward block to the stream; following: the norm it is read by."""
        finish = Finish(rows.hidden_MH, following, self.norms.behind_mlp)
        rows.pending = self._mlp(rows, finish)

    @staticmethod
    def products(partition: Partition, index: int) -> tuple[LayerProduct, ...]:
        """The products of layer `index`, as this rank holds them."""
        _, kind = feed_forward(partition.config, index)
        _, mixing = mixer(partition.config, index)
        return (*mixing.products(partition, index), *kind.products(partition))

    @staticmethod
    def sized_tensors(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes of tensors of layer `index` in which its sizes occur."""
        name, (block, kind) = f"model.layers.{index}", feed_forward(config, index)
        mixed, mixing = mixer(config, index)
        attention = mixing.sized_tensors(config, f"{name}.{mixed}")
        return attention | kind.sized_tensors(config, f"{name}.{block}")

    @staticmethod
    def norm_values(config: ModelConfig, index: int) -> int:
        """Values of the norms of layer `index`; every rank holds all of them."""
        _, kind = feed_forward(config, index)
        _, mixing = mixer(config, index)
        inside = mixing.norm_values(config) + kind.norm_values(config)
        return sum(map(bool, config.layer_norms)) * config.norm_values + inside

    def keep_routes(self, routes: torch.Tensor | None) -> None:
        """Where the experts of each row are kept from now on; None: nowhere."""
        if isinstance(self._mlp, ExpertMlp):
            self._mlp.routes = routes

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        for layer in (*self._read_norms, self._attention, self._mlp):
            layer.load(source)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._attention.adopt(arithmetic)
        self._mlp.adopt(arithmetic)
