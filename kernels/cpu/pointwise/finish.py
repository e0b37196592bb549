"""The end of a block's sums: the residual stream with them, and its norm; see `Finish`."""

import torch

from tpdet.kernels.cpu.pointwise.norm import rms_norm
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums


def fold_and_norm(sums: PartialSums, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y) of sums [C, M, N] with one root; each addition is rounded to fp32."""
    total = evaluate(sums.roots[0], lambda index: sums.values[index], torch.add).float()
    if finish.behind is not None:
        # + 0 turns a sum of -0 into +0, so that no y of the norm behind is -0 by it.
        total = rms_norm(total + 0.0, finish.behind).float()
    h = total + finish.residual.float()
    return h, h.to(finish.dtype) if finish.norm is None else rms_norm(h, finish.norm)
