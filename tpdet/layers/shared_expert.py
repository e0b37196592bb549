"""The expert that every row takes beside those that it chooses: a gated product and leaf sums."""

import torch

from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.kernels import ops
from tpdet.kernels.inputs.activations import KIND_OF
from tpdet.kernels.inputs.packed import WeightStack, numbers_of, side_by_side
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.layers.linear import GatedLinear
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct


class SharedExpert:
    """The leaf sums of down(act(gate(x)) * up(x)), unfolded: leaf g is added to lane g last.

    With a gate, a row's leaf sums are multiplied by its sigmoid; the router's product makes it.
    A rank has the leaves of its lanes. Where experts are cut over their outputs, it has all leaves,
    of its outputs: its gates and ups are then those of every rank, which spares a gather.
    """

    down_LNK: WeightStack | None = None

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config, self._cut = partition.config, partition.cut.shared
        self._arithmetic, self._name = partition.arithmetic, name
        self._leaves, self._outputs = held_leaves(partition), held_columns(partition)
        self._hidden, self._joins = config.hidden_size, joins_lanes(partition)
        shape = self._cut.edges[-1], config.hidden_size
        pieces = Pieces(0, self._cut.bounds, self._leaves)
        names = f"{name}.gate_proj", f"{name}.up_proj"
        self._gate_up = GatedLinear(
            source, partition.arithmetic, names, shape, pieces, config.activation
        )
        self._load_down(source)

    @staticmethod
    def products(partition: Partition) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        cut, leaves, config = partition.cut.shared, held_leaves(partition), partition.config
        inputs, widths = len(cut.inputs(leaves)), cut.widths(leaves)
        if not inputs:
            return ()
        kind = KIND_OF[config.activation]
        roots = write_roots(tuple(range(len(widths))))
        unequal, outputs = () if cut.alike else widths, len(held_columns(partition))
        down = Product("row", outputs, max(widths), len(widths), roots, unequal)
        return (
            LayerProduct("shared_gate_up", Product(kind, 2 * inputs, config.hidden_size)),
            LayerProduct("shared_down", down, joined=joins_lanes(partition)),
        )

    def load(self, source: WeightSource) -> None:
        """Read the weights again, in place."""
        self._gate_up.load(source)
        self._load_down(source)

    def _load_down(self, source: WeightSource) -> None:
        pieces = Pieces(1, self._cut.bounds, self._leaves)
        shape = self._hidden, self._cut.edges[-1]
        read = TensorRead(f"{self._name}.down_proj.weight", shape, pieces)
        widths = self._cut.widths(self._leaves)
        if not source.packing.packs([read.name], widths):
            source.read_for(self._place_down, read)
            return
        rows = slice(self._outputs.start, self._outputs.stop)
        packed = source.read_packed(read)
        own = packed.cut(rows, range(packed.shape[1])).compact()
        leaves = side_by_side(own, widths)
        self.down_LNK = source.packing.laid_out_leaves(leaves, self.down_LNK)

    def _place_down(self, read: torch.Tensor) -> None:
        mine = read[self._outputs.start : self._outputs.stop]
        leaves = len(self._cut.widths(self._leaves)) if self._cut.alike else 1
        by_leaf = mine.view(len(mine), leaves, -1).permute(1, 0, 2)
        self.down_LNK = place(numbers_of(self.down_LNK), self._arithmetic.lay_out(by_leaf))

    def gated(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Rows [M, H] -> act(gate) * up of this rank's leaves [M, I]."""
        return self._gate_up(x_MH)

    def __call__(
        self, mixed: torch.Tensor, gate_M1: torch.Tensor | None
    ) -> torch.Tensor | SharedRows:
        """Rows of `gated` -> fp32 [lanes, M, N] of this rank's lanes and outputs, or their makings.

        gate_M1: fp32, of a model that has it.
        """
        assert self.down_LNK is not None
        down = self.down_LNK
        if self._joins and isinstance(down, torch.Tensor):
            return SharedRows(mixed, down, gate_M1)
        held = [leaf - self._leaves.start for leaf in self._leaves if self._cut.inputs(_one(leaf))]
        values = self._leaf_sums(mixed, len(held))
        if gate_M1 is not None:
            values = ops.gate_lanes(values, gate_M1.contiguous())
        if len(held) == len(self._leaves):
            return values
        every = values.new_zeros(len(self._leaves), *values.shape[1:])
        every[held] = values
        return every

    def _leaf_sums(self, mixed: torch.Tensor, leaves: int) -> torch.Tensor:
        """The sums of the leaves that have inputs, fp32 [leaves, M, N]."""
        assert self.down_LNK is not None
        widths = () if self._cut.alike else self._cut.widths(self._leaves)
        sums = self._arithmetic.row(mixed, self.down_LNK, tuple(range(leaves)), widths)
        return sums.values if sums.folded else ops.fold_roots(sums, leaves)


class IdleSharedExpert:
    """What a rank has of a shared expert with fewer blocks of inputs than ranks: nothing to add.

    Its empty leaves are read all the same: they have digests, as on a rank that has others beside.
    """

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        hidden, cut, leaves = partition.config.hidden_size, partition.cut.shared, partition.mine
        width = cut.edges[-1]
        rows, columns = (Pieces(dim, cut.bounds, leaves) for dim in (0, 1))
        self._reads = (
            TensorRead(f"{name}.gate_proj.weight", (width, hidden), rows),
            TensorRead(f"{name}.up_proj.weight", (width, hidden), rows),
            TensorRead(f"{name}.down_proj.weight", (hidden, width), columns),
        )
        self.load(source)

    def load(self, source: WeightSource) -> None:
        """Read the digests again."""
        source.read_for(_drop, *self._reads)

    def gated(self, x_MH: torch.Tensor) -> torch.Tensor:
        """No columns, of whatever rows."""
        return x_MH[:, :0]

    def __call__(self, mixed: torch.Tensor, gate_M1: torch.Tensor | None) -> None:
        """Nothing, for whatever rows."""


def load_shared_expert(
    source: WeightSource, partition: Partition, name: str
) -> SharedExpert | IdleSharedExpert:
    """This rank's part of a layer's shared expert."""
    idle = not partition.cut.shared.inputs(held_leaves(partition))
    return (IdleSharedExpert if idle else SharedExpert)(source, partition, name)


def joins_lanes(partition: Partition) -> bool:
    """Whether dense leaves of this rank are multiplied where lanes are added up: equal ones, none
    empty, of a size that fits."""
    cut, leaves = partition.cut.shared, held_leaves(partition)
    widths, dtype = cut.widths(leaves), getattr(torch, partition.config.dtype)
    whole = cut.alike and len(widths) == len(leaves)
    return whole and SharedRows.joins(widths[0], dtype)


def held_leaves(partition: Partition) -> range:
    """Leaves of a shared expert, and lanes, that a rank holds."""
    return partition.mine if partition.experts is None else range(partition.leaves)


def held_columns(partition: Partition) -> range:
    """Outputs of a layer of experts that a rank holds."""
    size, world = partition.config.hidden_size, partition.world
    if partition.experts is None:
        return range(size)
    share = size // world.size
    return range(world.rank * share, (world.rank + 1) * share)


def _drop(*reads: torch.Tensor) -> None:
    """Take tensors without elements."""


def _one(leaf: int) -> range:
    return range(leaf, leaf + 1)
