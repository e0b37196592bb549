"""Operands of row products: leaf sums are measured with the kernel that reads them.

What a choice costs hangs on the subtrees that it folds and on how many sums are left. The reader is
`fold_and_norm` over all of them as one root, on a rank of several too: its exchange reads as many.
The peer is cuBLAS, and the residual and norm of its rounded result. Bits are compared with every
leaf apart.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.cost.static import leaf_choice
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm import leaf_trials, trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE
from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice, cut_roots
from tpdet.kernels.cuda.gemm.choice.shape_table import ProductChoice
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.cuda.pointwise import finish
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.product import Product, read_roots
from tpdet.kernels.order import Expression, fold_tree
from tpdet.kernels.partial_sums import PartialSums, whole_sum
from tpdet.tools.measurement.graph_times import rotated
from tpdet.tools.tune.products import Run, TunedCandidate, fewest_rows

_EPS = 1e-6


class LeafOperands:
    """Operands for up to `most_rows` rows of row products that differ in their roots only."""

    finalists = 3

    def __init__(self, products: Sequence[Product], most_rows: int, device: torch.device) -> None:
        """Draw them."""
        self.products = tuple(products)
        first, kinds = self.products[0], trial_data.KINDS
        self._rows = {
            kind: trial_data.trial_rows(kind, most_rows, first.leaves * first.k, device)
            for kind in kinds
        }
        self._weights = {kind: leaf_trials.trial_leaves(kind, first, device) for kind in kinds}
        self._results = {
            (product, kind): leaf_trials.wanted_roots(x, self._weights[kind], product, REFERENCE)
            for product in self.products
            for kind, x in self._rows.items()
        }
        self.cold = rotated(self._weights["random"])
        self._residual = torch.randn(most_rows, first.n, device=device)
        self._norm = Norm(torch.ones(first.n, dtype=torch.bfloat16, device=device), _EPS)
        self._gpu = hardware.gpu_of(device)

    def candidates(self, product: Product, bucket: int) -> dict[str, TunedCandidate]:
        """Choices by what they run, whatever the roots; the static choice first."""
        roots, named = read_roots(product.roots), {}
        for work, leaf in bucket_choices(product, roots, bucket, self._gpu).items():
            choice = ProductChoice(bucket, leaf.tile, None, leaf.cut, leaf.kernel)
            title = f"cut {leaf.cut} {leaf.kernel} {format_tile(leaf.tile)}"
            run = partial(self._sum_and_read, roots, leaf, bucket)
            named[work] = TunedCandidate(
                choice, title, run, partial(self._differs, product, choice)
            )
        return named

    def peer(self, bucket: int) -> Run:
        """The library's product, then residual and norm."""
        return partial(self._library, bucket)

    def _differs(self, product: Product, choice: ProductChoice, kind: str) -> bool:
        roots, results = read_roots(product.roots), self._results[product, kind]
        flags = []
        for m in {choice.bucket, fewest_rows(choice.bucket)}:
            x = self._rows[kind][:m]
            sums = leaf_gemm.leaf_sums(x, self._weights[kind], roots, choice.leaf_choice)
            flags.append(leaf_trials.differs(sums, results[:, :m]))
        return bool(torch.stack(flags).any())

    def _sum_and_read(
        self, roots: tuple[Expression, ...], leaf: LeafChoice, bucket: int, weight: torch.Tensor
    ) -> object:
        x, residual = self._rows["random"][:bucket], self._residual[:bucket]
        values = leaf_gemm.leaf_sums(x, weight, roots, leaf).values
        sums = PartialSums(values, (fold_tree("sequential", values.shape[0]),))
        return finish.fold_and_norm(sums, Finish(residual, self._norm))

    def _library(self, bucket: int, weight: torch.Tensor) -> object:
        x, residual = self._rows["random"][:bucket], self._residual[:bucket]
        product = torch.nn.functional.linear(x, weight.view(residual.shape[1], -1))
        return finish.fold_and_norm(whole_sum(product), Finish(residual, self._norm))


def bucket_choices(
    product: Product, roots: tuple[Expression, ...], bucket: int, gpu: Gpu
) -> dict[str, LeafChoice]:
    """What is measured at a bucket by what it runs, as text; the static choice first.

    Choices that run the same kernel over the same subtrees have one text: roots, groups, parts and
    pair of their form, kernel, tile.
    """
    n, k, leaves, sms = product.n, product.k, product.leaves, gpu.descriptor_programs
    static = leaf_choice(bucket, n, k, leaves, roots, float32=False, sms=sms, gpu=gpu)
    choices = {}
    for choice in (static, *leaf_candidates(bucket, n, k, leaves, roots, gpu)):
        parts = cut_roots(roots, choice.cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        sizes = "" if form is None else f"{form.roots}.{form.groups}.{form.parts}.{form.pair} "
        choices[f"{sizes}{choice.kernel} {format_tile(choice.tile)}"] = choice
    return choices
