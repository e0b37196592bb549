"""Operands of a product of one leaf, and the reference's results on each kind of data."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear

from tpdet.kernels import ops
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.cost.static import column_tile
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_library, by_tile
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.library import library_ways
from tpdet.kernels.cuda.gemm.choice.shape_table import ProductChoice
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.inputs.product import Product
from tpdet.tools.measurement.graph_times import rotated
from tpdet.tools.tune.products import Run, TunedCandidate, fewest_rows

ProductCall = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [M, K] and a weight [N, K] -> the product's result."""


class ColumnOperands:
    """Operands for up to `most_rows` rows of one product."""

    finalists = 4

    def __init__(self, products: Sequence[Product], most_rows: int, device: torch.device) -> None:
        """Draw them. products: one, which has no roots."""
        self.products = (product,) = tuple(products)
        n, k, kinds = product.n, product.k, trial_data.KINDS
        self._rows = {kind: trial_data.trial_rows(kind, most_rows, k, device) for kind in kinds}
        self._weights = {kind: trial_data.trial_weight(kind, n, k, device) for kind in kinds}
        self._results = {
            kind: by_tile(
                product.kind, x, self._weights[kind][: trial_data.BASE_ROWS], REFERENCE.at(k)
            )
            for kind, x in self._rows.items()
        }
        self.cold = rotated(self._weights["random"])
        self._gpu = hardware.gpu_of(device)

    def candidates(self, product: Product, bucket: int) -> dict[str, TunedCandidate]:
        """Tiles and the library's ways by their names, the static choice first."""
        n, k, kind = product.n, product.k, product.kind
        sms, wide = self._gpu.descriptor_programs, kind == "head"
        static = column_tile(bucket, n, k, float32=False, wide_out=wide, sms=sms)
        named: dict[str, TunedCandidate] = {}
        for tile in dict.fromkeys((static, *column_candidates(bucket, n, k, kind, self._gpu))):
            call = partial(by_tile, kind, tile=tile)
            choice, counts = ProductChoice(bucket, tile), (bucket, fewest_rows(bucket))
            named[format_tile(tile)] = self._candidate(choice, format_tile(tile), call, counts)
        for way in library_ways(product, bucket):
            call = partial(by_library, kind, way=way)
            choice = ProductChoice(bucket, static, way)
            named[way] = self._candidate(choice, way, call, (bucket,))
        return named

    def _candidate(
        self, choice: ProductChoice, title: str, call: ProductCall, counts: tuple[int, ...]
    ) -> TunedCandidate:
        """counts: rows at which bits are compared."""
        run = partial(call, self._rows["random"][: choice.bucket])
        return TunedCandidate(choice, title, run, partial(self._differs, call, counts))

    def peer(self, bucket: int) -> Run:
        """The library's product in the model's dtype."""
        call = linear_and_activation if self.products[0].gated else linear
        return partial(call, self._rows["random"][:bucket])

    def _differs(self, call: ProductCall, counts: tuple[int, ...], kind: str) -> bool:
        weight = self._weights[kind]
        try:
            flags = [
                trial_data.differs(call(self._rows[kind][:m], weight), self._results[kind][:m])
                for m in counts
            ]
            return bool(torch.stack(flags).any())
        except RuntimeError:  # a library way that does not exist for this shape
            torch.cuda.synchronize()
            return True


def linear_and_activation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What stock engines run in place of a gated product."""
    return ops.activate_and_multiply(linear(x, weight))
