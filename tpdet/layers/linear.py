"""Linear layers: column-parallel (all of K here, one chain) and row-parallel (leaves, folded)."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import Exchange, Pending, RankExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.kernels.inputs.gated import GROUP, halves, write_half
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.packed import (
    PackedMatrix,
    Weight,
    WeightStack,
    interleaved_rows,
    join_rows,
    numbers_of,
    side_by_side,
)
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

    def packed(self, read: PackedMatrix) -> PackedMatrix:
        """This rank's rows, in their order, with the zeros."""
        order = torch.arange(read.shape[0])
        if self.head_order:
            order = order.unflatten(0, (-1, len(self.head_order)))[:, list(self.head_order)]
        return read.with_rows(
            torch.nn.functional.pad(order.flatten(), (self.before, self.after), value=-1)
        )

    def read_into(self, target: torch.Tensor, read: torch.Tensor) -> None:
        """Copy this rank's rows, in their order, with the zeros, into `target`."""
        if self.head_order:
            heads = read.unflatten(0, (-1, len(self.head_order)))
            read = heads[:, list(self.head_order)].flatten(0, 1)
        last = self.before + len(read)
        target[: self.before] = 0
        target[self.before : last] = read
        target[last:] = 0


def read_parts(
    source: WeightSource,
    parts: Sequence[ColumnPart],
    old: torch.Tensor | None,
    suffix: str,
    *inputs: int,
) -> torch.Tensor:
    """The memory that tensors `NAME.suffix` [rows, *inputs] are read into, each into its rows.

    It is `old`, or new memory at first.
    """
    reads = [
        TensorRead(f"{part.name}.{suffix}", (part.rows, *inputs), part.pieces) for part in parts
    ]
    rows = [
        part.before + read.held[0] + part.after for part, read in zip(parts, reads, strict=True)
    ]
    memory, first = source.memory_for(old, (sum(rows), *inputs)), 0
    for part, read, count in zip(parts, reads, rows, strict=True):
        source.read_for(partial(part.read_into, memory[first : first + count]), read)
        first += count
    return memory


def read_packed_parts(
    source: WeightSource, parts: Sequence[ColumnPart], inputs: int
) -> PackedMatrix | None:
    """The weights of several parts as codes and scales; None where they are to be numbers."""
    reads = [TensorRead(f"{part.name}.weight", (part.rows, inputs), part.pieces) for part in parts]
    if not source.packing.packs([read.name for read in reads], [inputs]):
        return None
    return join_rows(
        [part.packed(source.read_packed(read)) for part, read in zip(parts, reads, strict=True)]
    )


class ColumnLinear:
    """y = x W^T + b with W's rows cut over ranks; several checkpoint tensors may stand in one."""

    weight: Weight | None = None
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
        packed = read_packed_parts(source, self._parts, self._in_features)
        if packed is None:
            memory = numbers_of(self.weight)
            self.weight = read_parts(source, self._parts, memory, "weight", self._in_features)
        else:
            self.weight = source.packing.laid_out(packed, self.weight)
        if self._has_bias:
            self.bias = read_parts(source, self._parts, self.bias, "bias")

    def __call__(self, x_MK: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [M, K] -> this rank's columns [M, N], rounded to a dtype, by default x's."""
        assert self.weight is not None
        return self._arithmetic.column(x_MK, self.weight, self.bias, dtype)

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply by this from now on."""
        self._arithmetic = arithmetic


class GatedLinear:
    """act(x G^T) * (x U^T) with the rows of G and U cut over ranks; they lie interleaved."""

    weight: Weight | None = None

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
        reads = [TensorRead(f"{name}.weight", self._shape, self._pieces) for name in self._names]
        self._width, inputs = reads[0].held
        if source.packing.packs([read.name for read in reads], [inputs]):
            packed = interleaved_rows(*map(source.read_packed, reads))
            self.weight = source.packing.laid_out(packed, self.weight)
            return
        rows = 2 * (self._width + -self._width % GROUP)
        memory = self.weight = source.memory_for(numbers_of(self.weight), (rows, inputs))
        for read, target in zip(reads, halves(memory), strict=True):
            source.read_for(partial(write_half, target), read)

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

    weight_LNK: WeightStack | None = None

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
        read = TensorRead(*self._read)
        if source.packing.packs([read.name], self._widths):
            packed = side_by_side(source.read_packed(read), self._widths)
            self.weight_LNK = source.packing.laid_out_leaves(packed, self.weight_LNK)
        else:
            source.read_for(self._place, read)
        self._bias.load(source)

    def _place(self, weight_NK: torch.Tensor) -> None:
        leaves = len(self._widths) if self._alike else 1  # unequal ones stay side by side
        by_leaf_LNK = weight_NK.view(len(weight_NK), leaves, -1).permute(1, 0, 2)
        memory = numbers_of(self.weight_LNK)
        self.weight_LNK = place(memory, self._arithmetic.lay_out(by_leaf_LNK))

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
        assert isinstance(self.weight_LNK, torch.Tensor)
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
