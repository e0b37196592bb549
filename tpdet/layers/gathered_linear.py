"""Row layers without a fold: outputs cut over ranks, inputs gathered, one chain over all of K."""

import torch

from tpdet.comm.exchange.columns import ColumnExchange
from tpdet.comm.exchange.fold import Done, Pending, RankExchange
from tpdet.comm.exchange.peer_columns import open_columns
from tpdet.errors import UsageError
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import K_GROUP
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.weights.place import place
from tpdet.weights.source import WeightSource


class GatheredLinear:
    """y = x W^T with W's rows cut over ranks; ranks exchange x and y and add nothing.

    Each output is one chain over all of K, rounded to x's dtype like a column product's. Then it is
    added to the residual stream, and the sum is normed, on every rank.
    """

    def __init__(
        self, source: WeightSource, partition: Partition, name: str, shape: tuple[int, int]
    ) -> None:
        exchange = partition.exchange
        if not isinstance(exchange, ColumnExchange):
            raise TypeError(f"{type(exchange).__name__} gathers no columns: open one that does")
        self._read = f"{name}.weight", shape, partition.by_leaf(shape[0], dim=0)
        self.weight = source.read(*self._read)
        self._exchange, self._arithmetic = exchange, partition.arithmetic

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        place(self.weight, source.read(*self._read))

    def __call__(self, x_MK: torch.Tensor, rows: MicroBatch, following: Norm) -> Pending:
        """This rank's columns x [M, K / ranks] -> the rows' residual stream with y added, normed.

        Both are complete on every rank.
        """
        whole_MK = self._exchange.gather_columns(x_MK)
        y_MN = self._arithmetic.column(whole_MK, self.weight)
        return Done(*self._exchange.gather_and_norm(y_MN, rows.hidden_MH, following))

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Refused: this rule has one arithmetic. Raises UsageError."""
        raise UsageError("row layers gather have no other arithmetic: use --row-layers fold")

    @staticmethod
    def product(partition: Partition, name: str, shape: tuple[int, int]) -> LayerProduct:
        """A layer's product on this rank; shape: (outputs, inputs) of the whole.

        Raises UsageError for outputs that do not make a multiple of 16 a leaf: ranks hold whole
        leaves of them.
        """
        outputs, inputs = shape
        if outputs % (K_GROUP * partition.leaves):
            raise UsageError(
                f"row layers of {outputs} outputs do not make {partition.leaves} multiples of "
                f"{K_GROUP}: use --row-layers fold, or fewer --leaves"
            )
        return LayerProduct(name, Product("column", outputs // partition.world.size, inputs))

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
