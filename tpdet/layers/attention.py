"""Self-attention over paged keys and values: heads cut over ranks."""

import torch

from tpdet.cache.kv import LayerPages
from tpdet.kernels import ops
from tpdet.kernels.paged_batch import PagedBatch
from tpdet.layers.linear import ColumnLinear, RowLinear
from tpdet.layers.partition import Partition
from tpdet.weights.pieces import Pieces
from tpdet.weights.source import WeightSource


class Attention:
    """q, k, v projection, optional head norm, rotary embedding, paged attention, output product."""

    def __init__(
        self, source: WeightSource, partition: Partition, name: str, window: int | None
    ) -> None:
        config = partition.config
        self._head = config.head_dim
        self._query_heads = partition.query_heads
        self._key_heads = len(partition.key_heads)
        self._eps = config.rms_norm_eps
        self._window = window
        query, key = config.num_heads * self._head, config.num_kv_heads * self._head
        parts = [(f"{name}.q_proj", query, partition.by_leaf(query, dim=0))]
        parts += [(f"{name}.{p}_proj", key, partition.by_key_head()) for p in ("k", "v")]
        self._qkv = ColumnLinear(source, parts, config.hidden_size, config.attention_bias)
        self._output = RowLinear(source, partition, f"{name}.o_proj", (config.hidden_size, query))
        self._query_norm = self._key_norm = None
        if config.qk_norm:
            whole = Pieces.whole()
            self._query_norm = source.read(f"{name}.q_norm.weight", (self._head,), whole)
            self._key_norm = source.read(f"{name}.k_norm.weight", (self._head,), whole)

    def __call__(
        self,
        x_MH: torch.Tensor,
        hidden_MH: torch.Tensor,
        norm_weight: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pages: LayerPages,
        batch: PagedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the residual stream [M, H] -> the stream with the result added, and its norm.

        Stores the step's k and v first.
        """
        rows = x_MH.shape[0]
        widths = [self._query_heads * self._head] + 2 * [self._key_heads * self._head]
        # Views: the kernels read rows that lie apart.
        parts = self._qkv(x_MH).split(widths, dim=1)
        q, k, v = (part.view(rows, -1, self._head) for part in parts)
        q_MQD = ops.rotate_heads(q, *rotary, self._query_norm, self._eps)
        k_MKD = ops.rotate_heads(k, *rotary, self._key_norm, self._eps)
        ops.store_kv(k_MKD, v, pages.keys, pages.values, batch)
        mixed = ops.paged_attention(q_MQD, pages.keys, pages.values, batch, self._window)
        return self._output(mixed.view(rows, -1), hidden_MH, norm_weight, self._eps)
