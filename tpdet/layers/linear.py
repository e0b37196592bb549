"""Linear layers: column-parallel (all of K here, one chain) and row-parallel (leaves, folded)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tpdet.checkpoint.pieces import Pieces
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Exchange, Pending, RankExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.kernels.inputs.gated import GROUP, interleaved
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.order import Leaves
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.row_bias import RowBias


class ColumnPart(NamedTuple):
    """A checkpoint tensor of a `ColumnLinear`: name without suffix, rows in all, how they are cut.

    before, after: rows of zeros that stand around this rank's. head_order: for each row of a head
    the row that stands there in the checkpoint; () if they stay.
    """

    name: str
    rows: int
    pieces: Pieces
    before: int = 0
    after: int = 0
    head_order: tuple[int, ...] = ()

    def padded(self, read: torch.Tensor) -> torch.Tensor:
        """This rank's rows, in their order, with the zeros."""
        if self.head_order:
            heads = read.unflatten(0, (-1, len(self.head_order)))
            read = heads[:, list(self.head_order)].flatten(0, 1)
        if not self.before and not self.after:
            return read
        rest = read.shape[1:]
        around = (read.new_zeros(rows, *rest) for rows in (self.before, self.after))
        return torch.cat([next(around), read, next(around)])


class ColumnLinear:
    """y = x W^T + b with W's rows cut over ranks; several checkpoint tensors may stand in one."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __init__(
        self,
        source: WeightSource,
        arithmetic: Arithmetic,
        parts: Sequence[ColumnPart],
        in_features: int,
        bias: bool,
    ) -> None:
        """parts: in the order in which their rows follow each other."""
        self._arithmetic = arithmetic
        self._parts, self._in_features, self._has_bias = tuple(parts), in_features, bias
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        weights = [
            part.padded(
                source.read(f"{part.name}.weight", (part.rows, self._in_features), part.pieces)
            )
            for part in self._parts
        ]
        self.weight = place(self.weight, torch.cat(weights))
        if self._has_bias:
            biases = [
                part.padded(source.read(f"{part.name}.bias", (part.rows,), part.pieces))
                for part in self._parts
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
    """act(x G^T) * (x U^T) with the rows of G and U cut over ranks; they lie interleaved."""

    weight: torch.Tensor | None = None

    def __init__(
        self,
        source: WeightSource,
        arithmetic: Arithmetic,
        names: tuple[str, str],
        shape: tuple[int, int],
        pieces: Pieces,
        activation: str,
    ) -> None:
        """names: of G and U, without suffix; shape: (outputs, inputs) of each in the checkpoint."""
        self._arithmetic, self._activation = arithmetic, activation
        self._names, self._shape, self._pieces = names, shape, pieces
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        gate, up = (
            source.read(f"{name}.weight", self._shape, self._pieces) for name in self._names
        )
        self._width = len(gate)
        zeros = -self._width % GROUP, *gate.shape[1:]  # none but of small models
        padded = (
            torch.cat([rows, rows.new_zeros(zeros)]) if zeros[0] else rows for rows in (gate, up)
        )
        self.weight = place(self.weight, interleaved(*padded))

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> this rank's columns of the activation [M, I], rounded to x's dtype."""
        assert self.weight is not None
        found = self._arithmetic.gated(x_MK, self.weight, self._activation)
        return found if found.shape[1] == self._width else found[:, : self._width]

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic


class RowLinear:
    """y = x W^T with W's columns cut over ranks: leaf sums in fp32, folded over all ranks.

    The sum goes on to the residual stream and the norm that follows, so the layer takes both.
    """

    weight_LNK: torch.Tensor | None = None

    def __init__(
        self, source: WeightSource, partition: Partition, name: str, outputs: int, cut: Leaves
    ) -> None:
        self._arithmetic = partition.arithmetic
        self._exchange = folding(partition.exchange)
        self._read = f"{name}.weight", (outputs, cut.edges[-1]), partition.by_leaf(cut, dim=1)
        self._widths = cut.widths(partition.mine)
        self._alike = cut.alike
        self._plan = partition.plan_of(cut)
        self._roots = relative_roots(self._plan.roots[partition.world.rank])
        self._bias = RowBias(partition, name, outputs)
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        weight_NK = source.read(*self._read)
        leaves = len(self._widths) if self._alike else 1  # unequal ones stay side by side
        by_leaf_LNK = weight_NK.view(len(weight_NK), leaves, -1).permute(1, 0, 2)
        self.weight_LNK = place(self.weight_LNK, self._arithmetic.lay_out(by_leaf_LNK))
        self._bias.load(source)

    def __call__(self, x_MK: torch.Tensor, rows: MicroBatch, finish: Finish) -> Pending:
        """This rank's columns x [M, K / ranks] -> what becomes of y: the stream and its norm.

        The norm is complete on every rank.
        """
        assert self.weight_LNK is not None
        widths = () if self._alike else self._widths
        sums = self._arithmetic.row(x_MK, self.weight_LNK, self._roots, widths)
        return rows.exchanged(self._exchange, sums, self._bias.added(finish), self._plan)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply and exchange by this from now on."""
        assert self.weight_LNK is not None
        self._arithmetic, self._exchange = arithmetic, folding(arithmetic.exchange)
        self.weight_LNK = arithmetic.lay_out(self.weight_LNK)

    @staticmethod
    def product(partition: Partition, name: str, outputs: int, cut: Leaves) -> LayerProduct:
        """A layer's product on this rank; cut: its inputs' leaves."""
        sent = partition.plan_of(cut).roots[partition.world.rank]
        roots, widths = write_roots(relative_roots(sent)), cut.widths(partition.mine)
        unequal = () if cut.alike else widths
        product = Product("row", outputs, max(widths), len(widths), roots, unequal)
        return LayerProduct(name, product, biased=partition.config.row_bias)

    @staticmethod
    def open_exchange(
        transport: str, partition: Partition, rows: int, dtype: torch.dtype, device: torch.device
    ) -> RankExchange:
        """The exchange of sums for steps of up to `rows` rows; see `open_exchange`."""
        hidden, world = partition.config.hidden_size, partition.world
        return open_exchange(transport, partition.plan, world, rows, hidden, dtype, device)


def folding(exchange: RankExchange) -> Exchange:
    """An exchange that folds sums. Raises TypeError for another."""
    if not isinstance(exchange, Exchange):
        raise TypeError(f"{type(exchange).__name__} folds no sums: open one that does")
    return exchange
