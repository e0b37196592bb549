"""Self-attention over paged keys and values: heads cut over ranks."""

import torch

from tpdet.cache.kv import LayerCache, LayerPages
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels import ops
from tpdet.kernels.exact.rotary_tables import head_order
from tpdet.kernels.inputs.norm import Finish, norm_weight
from tpdet.kernels.inputs.product import Product
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import ColumnLinear, ColumnPart
from tpdet.layers.micro_batch import MicroBatch, Projected
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.projection_norm import ProjectionNorm
from tpdet.layers.row_layers import row_linear, row_rule


class Attention:
    """q, k, v projection, optional head norm, rotary embedding, paged attention, output product."""

    _query_norm: torch.Tensor | None = None
    _key_norm: torch.Tensor | None = None
    _sinks: torch.Tensor | None = None

    def __init__(self, source: WeightSource, partition: Partition, name: str, index: int) -> None:
        config = partition.config
        self._head = config.head_dim
        self._queries, self._query_heads = partition.query_heads, len(partition.query_heads)
        self._padding = before, after = partition.padded_heads
        self._key_heads = len(partition.key_heads)
        self._eps = config.rms_norm_eps
        self._window, self._cap = config.windows[index], config.attention_cap
        query, key = config.num_heads * self._head, config.num_kv_heads * self._head
        heads, keys = partition.by_leaf(partition.cut.attention, dim=0), partition.by_key_head()
        padding = before * self._head, after * self._head
        self._order = order = head_order(self._head, config.rotary.dim, config.rotary_pairs)
        parts = [
            ColumnPart(f"{name}.q_proj", query, heads, *padding, order),
            ColumnPart(f"{name}.k_proj", key, keys, head_order=order),
            ColumnPart(f"{name}.v_proj", key, keys),
        ]
        self._gated = config.attention_gate
        if self._gated:
            parts.append(ColumnPart(f"{name}.gate_proj", query, heads, *padding))
        self._arithmetic = partition.arithmetic
        self._qkv = ColumnLinear(
            source, self._arithmetic, parts, config.hidden_size, config.attention_bias
        )
        self._output = row_linear(
            source, partition, f"{name}.o_proj", config.hidden_size, partition.cut.attention
        )
        self._row_norm = None
        if config.qk_norm_over == "row":
            normed = [parts[i]._replace(name=f"{name}.{p}_norm") for i, p in enumerate("qk")]
            self._row_norm = ProjectionNorm(source, partition, (normed[0], normed[1]))
        self._name, self._norm = name, config.norm
        self._has_norms = config.qk_norm and config.qk_norm_over == "head"
        self._load_norms(source)
        self._all_sinks = config.num_heads if config.sinks else 0
        self._load_sinks(source)

    @staticmethod
    def products(partition: Partition, index: int) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        config = partition.config
        queries = len(partition.query_heads) + sum(partition.padded_heads)
        heads = (1 + config.attention_gate) * queries + 2 * len(partition.key_heads)
        qkv = Product("column", heads * config.head_dim, config.hidden_size)
        written = 2 * qkv.n if config.qk_norm_over == "row" else qkv.n
        return (
            LayerProduct("qkv", qkv, biased=config.attention_bias, written=written),
            row_rule(partition).product(
                partition, "o", config.hidden_size, partition.cut.attention
            ),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes of tensors that show the numbers of heads and their size."""
        heads, key_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        return {
            f"{name}.q_proj.weight": (heads, config.hidden_size),
            f"{name}.k_proj.weight": (key_heads, config.hidden_size),
        }

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the norms of query and key heads, and of sinks."""
        sinks = config.num_heads if config.sinks else 0
        if config.qk_norm_over == "row":
            return (config.num_heads + config.num_kv_heads) * config.head_dim + sinks
        return (2 * config.head_dim if config.qk_norm else 0) + sinks

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        self._qkv.load(source)
        self._output.load(source)
        if self._row_norm is not None:
            self._row_norm.load(source)
        self._load_norms(source)
        self._load_sinks(source)

    def _load_norms(self, source: WeightSource) -> None:
        if not self._has_norms:
            return
        for part, put in (("q", self._place_query_norm), ("k", self._place_key_norm)):
            name = f"{self._name}.{part}_norm.weight"
            source.read_for(put, TensorRead(name, (self._head,), Pieces.whole()))

    def _place_query_norm(self, read: torch.Tensor) -> None:
        self._query_norm = place(self._query_norm, self._ordered_norm(read))

    def _place_key_norm(self, read: torch.Tensor) -> None:
        self._key_norm = place(self._key_norm, self._ordered_norm(read))

    def _ordered_norm(self, read: torch.Tensor) -> torch.Tensor:
        return norm_weight(self._norm, read[list(self._order) or slice(None)])

    def _load_sinks(self, source: WeightSource) -> None:
        """This rank's sinks, 0 for heads that pad it, in fp32."""
        if self._all_sinks:
            read = TensorRead(f"{self._name}.sinks", (self._all_sinks,), Pieces.whole())
            source.read_for(self._place_sinks, read)

    def _place_sinks(self, read: torch.Tensor) -> None:
        mine = read[self._queries.start : self._queries.stop].float()
        self._sinks = place(self._sinks, torch.nn.functional.pad(mine, self._padding))

    def project(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], pages: LayerCache
    ) -> Projected:
        """The rows' x -> their rotated queries [M, Hq, D]; their k and v are stored.

        Gates [M, Hq, D], where heads have them, are a second part. rotary: tables of cos and sin
        [positions, D / 2].
        """
        assert isinstance(pages, LayerPages)
        count, queries = rows.x_MH.shape[0], self._query_heads + sum(self._padding)
        widths = [queries * self._head] + 2 * [self._key_heads * self._head]
        widths += [queries * self._head] * self._gated
        # Views: the kernels read rows that lie apart.
        q_MN, k_MN, v_MN, *gates = self._qkv(rows.x_MH).split(widths, dim=1)
        if self._row_norm is not None:
            q_MN, k_MN = self._row_norm(q_MN, k_MN)
        q, k, v = (part.view(count, -1, self._head) for part in (q_MN, k_MN, v_MN))
        rotated = ops.rotate_and_store(
            q,
            k,
            v,
            rotary,
            (self._query_norm, self._key_norm),
            self._eps,
            (pages.keys, pages.values),
            rows.batch,
        )
        return rotated, *(gate.view(count, -1, self._head) for gate in gates)

    def attend(
        self, projected: Projected, rows: MicroBatch, finish: Finish, pages: LayerCache
    ) -> Pending:
        """Rows of `project` -> what becomes of the block's result: the stream and its norm.

        The rows may be some of those that were projected. Their x is not read.
        """
        assert isinstance(pages, LayerPages)
        before, after = self._padding
        seen = self._window, self._cap, self._sinks
        q_MQD, *gates = projected
        mixed = self._arithmetic.attend(q_MQD, pages, rows.batch, *seen)
        for gate_MQD in gates:
            mixed = ops.gate_heads(mixed, gate_MQD)
        if before or after:
            mixed = mixed[:, before : before + self._query_heads]
        return self._output(mixed.flatten(1), rows, finish)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._arithmetic = arithmetic
        self._qkv.adopt(arithmetic)
        if self._row_norm is not None:
            self._row_norm.adopt(arithmetic)
        self._output.adopt(arithmetic)
