"""Linear attention: gated delta-net layers, whose state stands in place of keys and values.

A rank has whole key heads, with the value heads that each serves, so all but the output product is
computed without its peers (docs/numerics.md). Suffixes: M rows, C channels of queries, keys and
values, K and V key and value heads, D the size of a head.
"""

from dataclasses import replace

import torch

from tpdet.cache.kv import LayerCache
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels import ops
from tpdet.kernels.inputs.linear_state import DeltaGates, LinearState
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import CONVOLUTION_TAPS, cut_leaves
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import ColumnLinear, ColumnPart, read_parts
from tpdet.layers.micro_batch import MicroBatch, Projected
from tpdet.layers.partition import Partition, state_shape
from tpdet.layers.products import LayerProduct
from tpdet.layers.row_layers import row_linear, row_rule


def _by_key_head(partition: Partition, linear: LinearAttention, rows: int) -> Pieces:
    """Cut a dimension that has so many rows for each key head."""
    return partition.by_leaf(cut_leaves(linear.key_heads, rows, partition.leaves), dim=0)


class DeltaNet:
    """Projections, short convolution, gated delta rule, gated norm, output product.

    Gated delta networks: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464).
    """

    _convolution: torch.Tensor | None = None
    _decay_factors: torch.Tensor | None = None
    _decay_biases: torch.Tensor | None = None
    _norm: torch.Tensor | None = None

    def __init__(self, source: WeightSource, partition: Partition, name: str, index: int) -> None:
        config, linear = partition.config, linear_of(partition.config)
        shape = state_shape(partition)
        assert shape is not None
        self._name, self._eps = name, config.rms_norm_eps
        self._key_size, self._value_size = linear.key_size, linear.value_size
        self._all_values = linear.value_heads
        self._widths = [shape.key_heads * linear.key_size] * 2
        self._widths.append(shape.value_heads * linear.value_size)
        sizes = dict.fromkeys("qk", linear.key_size)
        sizes |= dict.fromkeys("vz", linear.values_of_a_key * linear.value_size)
        sizes |= dict.fromkeys("ba", linear.values_of_a_key)
        cuts = {part: _by_key_head(partition, linear, size) for part, size in sizes.items()}
        rows = {part: linear.key_heads * size for part, size in sizes.items()}
        self._by_value_head = replace(cuts["a"], exact=True)
        arithmetic, hidden = partition.arithmetic, config.hidden_size
        mixed, gates = (
            [ColumnPart(f"{name}.in_proj_{part}", rows[part], cuts[part]) for part in parts]
            for parts in ("qkvz", "ba")
        )
        self._mixed = ColumnLinear(source, arithmetic, mixed, hidden, bias=False)
        self._gates = ColumnLinear(source, arithmetic, gates, hidden, bias=False)
        self._channels = [
            ColumnPart(f"{name}.{part}_conv1d", rows[part], cuts[part]) for part in "qkv"
        ]
        self._output = row_linear(
            source, partition, f"{name}.out_proj", hidden, partition.cut.linear
        )
        self._load(source)

    @staticmethod
    def products(partition: Partition, index: int) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        hidden, shape = partition.config.hidden_size, state_shape(partition)
        assert shape is not None
        mixed = shape.channels + shape.value_heads * shape.value_size
        return (
            LayerProduct("qkvz", Product("column", mixed, hidden), written=2 * mixed),
            LayerProduct("ba", Product("head", 2 * shape.value_heads, hidden)),
            row_rule(partition).product(partition, "linear_o", hidden, partition.cut.linear),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes of tensors that show the numbers of heads and their sizes."""
        linear, hidden = linear_of(config), config.hidden_size
        keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
        return {
            f"{name}.in_proj_k.weight": (keys, hidden),
            f"{name}.in_proj_v.weight": (values, hidden),
            f"{name}.A_log": (linear.value_heads,),
        }

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the gated norm; its fp32 numbers of heads are few."""
        return linear_of(config).value_size

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        for layer in (self._mixed, self._gates, self._output):
            layer.load(source)
        self._load(source)

    def _load(self, source: WeightSource) -> None:
        """What is no product: the convolution in the model's dtype, the others as stored."""
        known = self._convolution
        memory = None if known is None else known[:, None]
        read = read_parts(source, self._channels, memory, "weight", 1, CONVOLUTION_TAPS)
        self._convolution = read[:, 0]
        heads, norm = (self._all_values,), (self._value_size,)
        source.read_for(
            self._place_exact,
            TensorRead(f"{self._name}.A_log", heads, self._by_value_head),
            TensorRead(f"{self._name}.dt_bias", heads, self._by_value_head),
            TensorRead(f"{self._name}.norm.weight", norm, Pieces.whole(exact=True)),
        )

    def _place_exact(self, factors: torch.Tensor, biases: torch.Tensor, norm: torch.Tensor) -> None:
        self._decay_factors = place(self._decay_factors, factors)
        self._decay_biases = place(self._decay_biases, biases)
        self._norm = place(self._norm, norm)

    def project(
        self, rows: MicroBatch, rotary: tuple[torch.Tensor, torch.Tensor], state: LayerCache
    ) -> Projected:
        """The rows' x -> what the output product reads [M, V, D]; the state takes them in."""
        assert self._convolution is not None and self._norm is not None
        assert self._decay_factors is not None and self._decay_biases is not None
        assert isinstance(state, LinearState)
        count = len(rows.x_MH)
        channels = sum(self._widths)
        with ops.pair_of_launches(rows.x_MH.device):
            gates_MN = self._gates(rows.x_MH, torch.float32)
            mixed_MN = self._mixed(rows.x_MH)
        b_MV, a_MV = gates_MN.chunk(2, dim=1)
        with ops.pair_of_launches(rows.x_MH.device):
            x_MC = ops.short_convolution(
                mixed_MN[:, :channels], self._convolution, state, rows.batch
            )
            q, k, v = x_MC.split(self._widths, dim=1)
            o_MVD = ops.gated_delta(
                q.view(count, -1, self._key_size),
                k.view(count, -1, self._key_size),
                v.view(count, -1, self._value_size),
                a_MV,
                b_MV,
                DeltaGates(self._decay_factors, self._decay_biases),
                state,
                rows.batch,
            )
        z_MVD = mixed_MN[:, channels:].view(count, -1, self._value_size)
        return (ops.gated_norm(o_MVD, z_MVD, self._norm, self._eps),)

    def attend(
        self, projected: Projected, rows: MicroBatch, finish: Finish, state: LayerCache
    ) -> Pending:
        """Rows of `project` -> what becomes of the block's result: the stream and its norm."""
        (mixed_MVD,) = projected
        return self._output(mixed_MVD.flatten(1), rows, finish)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        for layer in (self._mixed, self._gates, self._output):
            layer.adopt(arithmetic)


def linear_of(config: ModelConfig) -> LinearAttention:
    """The linear layers of a model. Raises ValueError for a model without any."""
    if config.linear is None:
        raise ValueError(f"{config.family} has no linear attention")
    return config.linear
