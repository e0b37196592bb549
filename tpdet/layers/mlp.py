"""Feed-forward blocks, gated and plain: their first products cut by columns, the last by rows."""

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Pending
from tpdet.kernels import ops
from tpdet.kernels.inputs.activations import KIND_OF
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.product import Product
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import ColumnLinear, ColumnPart, GatedLinear
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.row_layers import row_linear, row_rule


class GatedMlp:
    """down(act(gate(x)) * up(x)), its last product made whole over ranks, added to the stream."""

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config = partition.config
        hidden, width = config.hidden_size, config.intermediate_size
        cut = partition.by_leaf(partition.cut.down, dim=0)
        names = f"{name}.gate_proj", f"{name}.up_proj"
        self._gate_up = GatedLinear(
            source, partition.arithmetic, names, (width, hidden), cut, config.activation
        )
        self._down = row_linear(source, partition, f"{name}.down_proj", hidden, partition.cut.down)

    @staticmethod
    def products(partition: Partition) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        hidden, down = partition.config.hidden_size, partition.cut.down
        mine, kind = len(down.inputs(partition.mine)), KIND_OF[partition.config.activation]
        return (
            LayerProduct("gate_up", Product(kind, 2 * mine, hidden)),
            row_rule(partition).product(partition, "down", hidden, down),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shape of a tensor that shows the block's width."""
        return {f"{name}.gate_proj.weight": (config.intermediate_size, config.hidden_size)}

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the block's norms: it has none."""
        return 0

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        self._gate_up.load(source)
        self._down.load(source)

    def __call__(self, rows: MicroBatch, finish: Finish) -> Pending:
        """The rows' x -> what becomes of the block's result: the stream and its norm."""
        return self._down(self._gate_up(rows.x_MH), rows, finish)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._gate_up.adopt(arithmetic)
        self._down.adopt(arithmetic)


class PlainMlp:
    """c_proj(act(c_fc(x))), both with biases: a block without gates (Starcoder2).

    What the activation reads is rounded to the model's dtype, as every column product.
    """

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config = partition.config
        cut = partition.by_leaf(partition.cut.down, dim=0)
        part = ColumnPart(f"{name}.c_fc", config.intermediate_size, cut)
        self._in = ColumnLinear(source, partition.arithmetic, [part], config.hidden_size, bias=True)
        self._activation = config.activation
        self._out = row_linear(
            source, partition, f"{name}.c_proj", config.hidden_size, partition.cut.down
        )

    @staticmethod
    def products(partition: Partition) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        hidden, down = partition.config.hidden_size, partition.cut.down
        mine = len(down.inputs(partition.mine))
        return (
            LayerProduct("fc", Product("column", mine, hidden), biased=True, written=mine),
            row_rule(partition).product(partition, "down", hidden, down),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shape of a tensor that shows the block's width."""
        return {f"{name}.c_fc.weight": (config.intermediate_size, config.hidden_size)}

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the block's norms: it has none."""
        return 0

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        self._in.load(source)
        self._out.load(source)

    def __call__(self, rows: MicroBatch, finish: Finish) -> Pending:
        """The rows' x -> what becomes of the block's result: the stream and its norm."""
        return self._out(ops.activate_alone(self._in(rows.x_MH), self._activation), rows, finish)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on."""
        self._in.adopt(arithmetic)
        self._out.adopt(arithmetic)
