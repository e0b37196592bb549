"""Linear layers: column-parallel (all of K here, one chain) and row-parallel (leaves, folded)."""

from collections.abc import Sequence

import torch

from tpdet.comm.exchange.fold import Done, Exchange, Pending, RankExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.weights.pieces import Pieces
from tpdet.weights.place import place
from tpdet.weights.source import WeightSource


class ColumnLinear:
    """y = x W^T + b with W's rows cut over ranks; several checkpoint tensors may stand in one."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __init__(
        self,
        source: WeightSource,
        arithmetic: Arithmetic,
        parts: Sequence[tuple[str, int, Pieces]],
        in_features: int,
        bias: bool,
    ) -> None:
        """parts: (name without suffix, rows in the checkpoint, how they are cut), in order."""
        self._arithmetic = arithmetic
        self._parts, self._in_features, self._has_bias = tuple(parts), in_features, bias
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        weights = [
            source.read(f"{name}.weight", (rows, self._in_features), pieces)
            for name, rows, pieces in self._parts
        ]
        self.weight = place(self.weight, torch.cat(weights))
        if self._has_bias:
            biases = [
                source.read(f"{name}.bias", (rows,), pieces) for name, rows, pieces in self._parts
            ]
            self.bias = place(self.bias, torch.cat(biases))

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> this rank's columns [M, N], rounded to x's dtype."""
        assert self.weight is not None
        return self._arithmetic.column(x_MK, self.weight, self.bias)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic


class GatedLinear:
    """silu(x G^T) * (x U^T) with the rows of G and U cut over ranks; they lie interleaved."""

    weight: torch.Tensor | None = None

    def __init__(
        self,
        source: WeightSource,
        arithmetic: Arithmetic,
        names: tuple[str, str],
        shape: tuple[int, int],
        pieces: Pieces,
    ) -> None:
        """names: of G and U, without suffix; shape: (outputs, inputs) of each in the checkpoint."""
        self._arithmetic = arithmetic
        self._names, self._shape, self._pieces = names, shape, pieces
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        gate, up = (
            source.read(f"{name}.weight", self._shape, self._pieces) for name in self._names
        )
        self.weight = place(self.weight, interleaved(gate, up))

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> this rank's columns of the activation [M, I], rounded to x's dtype."""
        assert self.weight is not None
        return self._arithmetic.gated(x_MK, self.weight)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic


class RowLinear:
    """y = x W^T with W's columns cut over ranks: leaf sums in fp32, folded over all ranks.

    The sum goes on to the residual stream and the norm that follows, so the layer takes both.
    """

    weight_LNK: torch.Tensor | None = None

    def __init__(
        self, source: WeightSource, partition: Partition, name: str, shape: tuple[int, int]
    ) -> None:
        self._arithmetic = partition.arithmetic
        self._exchange = _folding(partition.exchange)
        self._name, self._shape = f"{name}.weight", shape
        self._pieces = partition.by_leaf(shape[1], dim=1)
        self.load(source)
        self._roots = relative_roots(
            partition.plan.roots[partition.world.rank], partition.mine.start
        )

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        weight_NK = source.read(self._name, self._shape, self._pieces)
        leaves = len(self._pieces.mine)
        by_leaf_LNK = weight_NK.view(self._shape[0], leaves, -1).permute(1, 0, 2)
        self.weight_LNK = place(self.weight_LNK, self._arithmetic.lay_out(by_leaf_LNK))

    def __call__(self, x_MK: torch.Tensor, rows: MicroBatch, following: Norm) -> Pending:
        """This rank's columns x [M, K / ranks] -> the rows' residual stream with y added, normed.

        The stream is fp32; its norm is complete on every rank.
        """
        assert self.weight_LNK is not None
        sums = self._arithmetic.row(x_MK, self.weight_LNK, self._roots)
        if rows.overlapped:
            return self._exchange.begin(sums, rows.hidden_MH, following)
        return Done(*self._exchange.fold_and_norm(sums, rows.hidden_MH, following))

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply and exchange by this from now on."""
        assert self.weight_LNK is not None
        self._arithmetic, self._exchange = arithmetic, _folding(arithmetic.exchange)
        self.weight_LNK = arithmetic.lay_out(self.weight_LNK)

    @staticmethod
    def product(partition: Partition, name: str, shape: tuple[int, int]) -> LayerProduct:
        """A layer's product on this rank; shape: (outputs, inputs) of the whole."""
        outputs, inputs = shape
        sent = partition.plan.roots[partition.world.rank]
        roots = write_roots(relative_roots(sent, partition.mine.start))
        leaves = len(partition.mine)
        return LayerProduct(
            name, Product("row", outputs, inputs // partition.leaves, leaves, roots)
        )

    @staticmethod
    def open_exchange(
        transport: str, partition: Partition, rows: int, dtype: torch.dtype, device: torch.device
    ) -> RankExchange:
        """The exchange of sums for steps of up to `rows` rows; see `open_exchange`."""
        hidden, world = partition.config.hidden_size, partition.world
        return open_exchange(transport, partition.plan, world, rows, hidden, dtype, device)


def _folding(exchange: RankExchange) -> Exchange:
    if not isinstance(exchange, Exchange):
        raise TypeError(f"{type(exchange).__name__} folds no sums: open one that does")
    return exchange
