"""The decoder layer of all families: attention and feed-forward, norms before or after each."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, TypeAlias

import torch

from tpdet.cache.kv import LayerPages
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels.inputs.norm import Norm
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.attention import Attention
from tpdet.layers.experts import ExpertMlp
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.mlp import GatedMlp, PlainMlp
from tpdet.layers.norm import NormedBlock, NormLayer
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct

FeedForward: TypeAlias = type[GatedMlp] | type[PlainMlp] | type[ExpertMlp]


class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream.

    Which norms stand before a block and which behind it, before the addition, is data
    (`ModelConfig.layer_norms`). A block without a norm before it reads the stream rounded to the
    model's dtype.
    """

    feed_forward: ClassVar[type[GatedMlp] | type[PlainMlp]] = GatedMlp
    """The block of layers without experts."""

    @classmethod
    def _block(cls, config: ModelConfig, index: int) -> tuple[str, FeedForward]:
        """The name in the checkpoint, and the kind, of the feed-forward block of layer `index`."""
        if config.mixture is not None and config.has_experts(index):
            return config.mixture.block, ExpertMlp
        return "mlp", cls.feed_forward

    def __init__(self, source: WeightSource, partition: Partition, index: int) -> None:
        config, name = partition.config, f"model.layers.{index}"
        self._norms = [
            NormLayer(source, config, f"{name}.{norm}") if norm else None
            for norm in config.layer_norms
        ]
        self._attention = Attention(source, partition, f"{name}.self_attn", config.windows[index])
        block, kind = self._block(config, index)
        self._mlp = kind(source, partition, f"{name}.{block}")
        self.index = index

    @property
    def input_norm(self) -> Norm | None:
        """The norm before attention."""
        return self._norm(0)

    def _norm(self, place: int) -> Norm | None:
        layer = self._norms[place]
        return None if layer is None else layer.norm

    @classmethod
    def products(cls, partition: Partition, index: int) -> tuple[LayerProduct, ...]:
        """The products of layer `index`, as this rank holds them."""
        _, kind = cls._block(partition.config, index)
        return (*Attention.products(partition), *kind.products(partition))

    @classmethod
    def sized_tensors(cls, config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes of tensors of layer `index` in which its sizes occur."""
        name, (block, kind) = f"model.layers.{index}", cls._block(config, index)
        attention = Attention.sized_tensors(config, f"{name}.self_attn")
        return attention | kind.sized_tensors(config, f"{name}.{block}")

    @classmethod
    def norm_values(cls, config: ModelConfig, index: int) -> int:
        """Values of the norms of layer `index`; every rank holds all of them."""
        _, kind = cls._block(config, index)
        inside = Attention.norm_values(config) + kind.norm_values(config)
        return sum(map(bool, config.layer_norms)) * config.norm_values + inside

    def keep_routes(self, routes: torch.Tensor | None) -> None:
        """Where the experts of each row are kept from now on; None: nowhere."""
        if isinstance(self._mlp, ExpertMlp):
            self._mlp.routes = routes

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        for norm in self._norms:
            if norm is not None:
                norm.load(source)
        self._attention.load(source)
        self._mlp.load(source)

    def attend(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], pages: LayerPages
    ) -> Pending:
        """Attention on the rows' x; the stream comes back as the feed-forward block reads it."""
        return self.attend_with(self.project(rows, rotary, pages), rows, pages)

    def project(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], pages: LayerPages
    ) -> torch.Tensor:
        """The first part of `attend`: queries [M, Hq, D]; keys and values are stored."""
        return self._attention.project(rows, rotary, pages)

    def attend_with(self, q_MQD: torch.Tensor, rows: MicroBatch, pages: LayerPages) -> Pending:
        """The rest of `attend`, which reads no x of the rows; they may be some of those before."""

        def attend(rows: MicroBatch, norm: Norm) -> Pending:
            return self._attention.attend(q_MQD, rows, norm, pages)

        return self._added(attend, rows, self._norm(1), self._norm(2))

    def feed(self, rows: MicroBatch, following: Norm | None) -> Pending:
        """The feed-forward block; the stream comes back normed for what follows."""
        return self._added(self._mlp, rows, self._norm(3), following)

    @staticmethod
    def _added(
        block: Callable[[MicroBatch, Norm], Pending],
        rows: MicroBatch,
        behind: Norm | None,
        following: Norm | None,
    ) -> Pending:
        """A block's exchange: it adds to the stream itself unless a norm stands behind the block.

        Such a block gets a stream of zeros, so that its exchange norms its sums alone.
        """
        if behind is None:
            assert following is not None  # of two blocks in a row one has a norm between them
            return block(rows, following)
        stream = rows.hidden_MH
        zeros = stream.new_zeros(1, stream.shape[1]).expand_as(stream)
        return NormedBlock(block(replace(rows, hidden_MH=zeros), behind), stream, following)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._attention.adopt(arithmetic)
        self._mlp.adopt(arithmetic)
