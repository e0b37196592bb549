"""Which quantised weights stay codes and scales, and where a GPU has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tpdet.checkpoint.checkpoint import Checkpoint
from tpdet.checkpoint.dummy import BLOCK, draw_packed, is_quantised
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.checkpoint.pieces import PieceRead, TensorRead
from tpdet.errors import UsageError
from tpdet.kernels.inputs.ordered import OrderedForm, OrderedWeight
from tpdet.kernels.inputs.ordering import ordered_weight, refusal
from tpdet.kernels.inputs.packed import (
    PackedMatrix,
    PackedStack,
    Weight,
    WeightStack,
    join_columns,
    join_rows,
)


@dataclass
class Packing:
    """The packed weights of one source.

    enabled: whether quantised weights of the layers' products stay as they are stored. on_gpu:
    whether a GPU's kernels are to read them. drawn: the form of random weights of a quantised
    model. forms, expert_forms: of the weights that a GPU has, of experts apart.
    """

    checkpoint: Checkpoint | None
    dtype: torch.dtype
    device: torch.device
    seed: int
    enabled: bool = False
    on_gpu: bool = False
    drawn: Quantisation | None = None
    forms: dict[OrderedForm, None] = field(default_factory=dict)
    expert_forms: dict[OrderedForm, None] = field(default_factory=dict)

    def packs(self, names: Sequence[str], widths: Sequence[int]) -> bool:
        """Whether matrices can stay packed together: all are in one form, which a kernel reads.

        widths: columns of their chains. Raises UsageError where no kernel of a GPU reads them.
        Random pieces begin groups of their own, so chains that do not fill groups are numbers.
        """
        if not self._alike(names):
            return False
        if not self.on_gpu:
            group = 1 if self.drawn is None else self.drawn.group or 1
            return not any(width % group for width in widths)
        why = refusal(self._sample(names[0]), widths)
        if why:
            raise UsageError(
                f"weights packed: no kernel of a GPU reads {why} (tensor {names[0]}): use weights "
                "auto"
            )
        return True

    def _alike(self, names: Sequence[str]) -> bool:
        """Whether they are to stay packed if they can, and are in one form."""
        if not self.enabled:
            return False
        if self.checkpoint is None:
            return self.drawn is not None and all(map(is_quantised, names))
        forms = [self.checkpoint.forms.get(name) for name in names]
        return forms[0] is not None and all(form == forms[0] for form in forms)

    def _sample(self, name: str) -> PackedMatrix:
        """The first values of a matrix that is packed, for its form."""
        if self.checkpoint is not None:
            return replace(self.checkpoint.first_packed(name), dtype=self.dtype)
        assert self.drawn is not None
        matrix = draw_packed(self.seed, name, 0, (1, self.drawn.group or 1), self.drawn)
        return replace(matrix, dtype=self.dtype)

    def matrix(self, read: TensorRead) -> PackedMatrix:
        """This rank's pieces of a matrix that `packs` has, unchecked, on the device."""
        if self.checkpoint is not None:
            matrix = self.checkpoint.packed(read)
        else:
            join = join_rows if read.pieces.dim == 0 else join_columns
            matrix = join([self.draw(piece) for piece in read.each()])
        return replace(matrix, dtype=self.dtype).on(self.device)

    def unread(self, read: TensorRead) -> PackedMatrix:
        """A matrix of the form and shape of `matrix`, in which nothing means anything."""
        sample, (rows, columns) = self._sample(read.name), read.held
        size, device = (rows, columns * sample.bits // 8), self.device
        codes = torch.zeros(size, dtype=torch.uint8, device=device)
        groups, of_rows = -(-columns // (sample.group or columns)), None
        if sample.scale_rows is not None:
            of_rows = (torch.arange(rows, device=device) // BLOCK).int()
        many = rows if of_rows is None else -(-rows // BLOCK)
        scales = torch.ones(many, groups, device=device)
        return replace(
            sample,
            codes=codes,
            columns=range(columns),
            scales=scales.to(sample.scales.dtype),
            lead=0,
            scale_rows=of_rows,
        )

    def draws(self, name: str) -> bool:
        """Whether random weights of a name are codes and scales."""
        return self.drawn is not None and is_quantised(name)

    def draw(self, piece: PieceRead) -> PackedMatrix:
        """A random piece of a quantised matrix."""
        assert self.drawn is not None
        rows, columns = piece.shape
        shape, name = (rows, columns), piece.tensor.name
        return draw_packed(self.seed, name, piece.number, shape, self.drawn, self.device)

    def laid_out(self, matrix: PackedMatrix, old: Weight | None) -> Weight:
        """A packed matrix as the device's kernels read it: in the memory of the old one, if any."""
        return self._ordered([matrix], old, self.forms) if self.on_gpu else matrix

    def laid_out_leaves(self, leaves: PackedStack, old: WeightStack | None) -> WeightStack:
        """The same of a row product's leaves."""
        return self._ordered(leaves.matrices, old, self.forms) if self.on_gpu else leaves

    def laid_out_experts(self, experts: PackedStack, old: WeightStack | None) -> WeightStack:
        """The same of a layer's experts."""
        if not self.on_gpu:
            return experts
        return self._ordered(experts.matrices, old, self.expert_forms)

    def _ordered(
        self, matrices: Sequence[PackedMatrix], old: object, forms: dict[OrderedForm, None]
    ) -> OrderedWeight:
        weight = ordered_weight(matrices)
        forms[weight.form] = None
        return old.copy_(weight) if isinstance(old, OrderedWeight) else weight
