"""Row layers without a fold: outputs cut over ranks, inputs gathered, one chain over all of K."""

from functools import partial

import torch

from tpdet.checkpoint.pieces import TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.columns import ColumnExchange
from tpdet.comm.exchange.fold import Done, Pending, RankExchange
from tpdet.comm.exchange.peer_columns import open_columns
from tpdet.errors import UsageError
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.packed import PackedMatrix, Weight, numbers_of
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import Leaves
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.row_bias import RowBias


class GatheredLinear:
    """y = x W^T with W's rows cut over ranks; ranks exchange x and y and add nothing.

    Each output is one chain over all of K, rounded to x's dtype like a column product's. Then it is
    added to the residual stream, and the sum is normed, on every rank.
    """

    def __init__(
        self, source: WeightSource, partition: Partition, name: str, outputs: int, cut: Leaves
    ) -> None:
        exchange = partition.exchange
        if not isinstance(exchange, ColumnExchange):
            raise TypeError(f"{type(exchange).__name__} gathers no columns: open one that does")
        rows = partition.by_leaf(partition.cut.outputs, dim=0)
        self._read = f"{name}.weight", (outputs, cut.edges[-1]), rows
        self._inputs, self._outputs = (
            partition.by_rank(each) for each in (cut, partition.cut.outputs)
        )
        packed = self._packed(source)
        self.weight: Weight = (
            source.read(*self._read) if packed is None else source.packing.laid_out(packed, None)
        )
        self._bias = RowBias(partition, name, outputs)
        self._bias.load(source)
        self._exchange, self._arithmetic = exchange, partition.arithmetic

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        packed = self._packed(source)
        if packed is None:
            source.read_for(partial(place, numbers_of(self.weight)), TensorRead(*self._read))
        else:
            self.weight = source.packing.laid_out(packed, self.weight)
        self._bias.load(source)

    def _packed(self, source: WeightSource) -> PackedMatrix | None:
        read = TensorRead(*self._read)
        packs = source.packing.packs([read.name], [read.shape[1]])
        return source.read_packed(read) if packs else None

    def __call__(self, x_MK: torch.Tensor, rows: MicroBatch, finish: Finish) -> Pending:
        """Columns x [M, K'] -> what becomes of y: stream and norm, complete on every rank."""
        whole_MK = self._exchange.gather_columns(x_MK, self._inputs)
        y_MN = self._arithmetic.column(whole_MK, self.weight)
        finish = self._bias.added(finish)
        return Done(*self._exchange.gather_and_norm(y_MN, finish, self._outputs))

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Refused: this rule has one arithmetic. Raises UsageError."""
        raise UsageError("row layers gather have no other arithmetic: use --row-layers fold")

    @staticmethod
    def product(partition: Partition, name: str, outputs: int, cut: Leaves) -> LayerProduct:
        """A layer's product on this rank; cut: its inputs' leaves, which it takes whole."""
        mine = len(partition.cut.outputs.inputs(partition.mine))
        biased = partition.config.row_bias
        return LayerProduct(name, Product("column", mine, cut.edges[-1]), biased=biased)

    @staticmethod
    def open_exchange(
        transport: str, partition: Partition, rows: int, dtype: torch.dtype, device: torch.device
    ) -> RankExchange:
        """The exchange of columns for steps of up to `rows` rows; see `open_columns`."""
        config = partition.config
        widest = max(config.num_heads * config.head_dim, config.intermediate_size)
        return open_columns(
            transport,
            partition.plan,
            partition.world,
            rows,
            (widest, config.hidden_size),
            dtype,
            device,
        )
