"""Start-up check of packed experts' tiles: each held against the dense product, as `admission.py`.

A form's weights are drawn (`gemm/packed/admission.py`), and `PackedMatrix` makes their numbers.
"""

from collections.abc import Iterable, Sequence
from itertools import product

import torch

from tpdet.kernels.cuda.experts.admission import EXPERTS, differs_for
from tpdet.kernels.cuda.experts.packed_tiles import packed_tiles_in_use
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.packed.admission import drawn_weight
from tpdet.kernels.inputs.ordered import OrderedForm
from tpdet.kernels.inputs.product import Product


def failing_experts(
    forms: Iterable[OrderedForm], products: Sequence[Product], device: torch.device
) -> tuple[int, list[str]]:
    """How many were tried, and those that differ or do not run. products: of single experts."""
    tried, failed = 0, []
    for form in sorted(forms):
        _, n, k = form.shape
        gated = any(other.gated for other in products if (other.n, other.k) == (n, k))
        weight, numbers = drawn_weight(form._replace(shape=(EXPERTS, n, k)), device)
        used = dict.fromkeys(packed_tiles_in_use(k))
        for (tile, by_token), kind in product(used, trial_data.KINDS):
            tried += 1
            try:
                differ = differs_for(kind, weight, numbers, gated, tile, by_token)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed.append(f"experts {form} by {tile} ({type(error).__name__}: {error!s:.120})")
            else:
                if differ:
                    failed.append(f"experts {form} by {tile}, {kind} data")
    return tried, failed
