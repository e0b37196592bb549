"""A layer's experts on one rank: from a step's rows and their choice to the roots of its lanes.

    h   = round(act(g) * u), g and u chains over all of H, plus their biases, fp32
    y   = round(chain over all of I, plus its bias)
    lane = (..((+0 + w_a * y_a) + w_b * y_b) ..) [+ shared]      fp32, no fma, ascending ids

Each expert takes the rows that chose it in calls of the bit class (`cpu/gemm/column.py`), so a row
has the bits of a dense product by that expert's weight.
"""

import torch

from tpdet.kernels.cpu.gemm.column import column_gemm
from tpdet.kernels.cpu.pointwise.activation import activate_and_multiply
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums


def expert_sums(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    lanes: Lanes,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
) -> PartialSums:
    """x [M, H], ids int32 and weights fp32 [M, k] -> the roots of this rank's lanes [R, M, H].

    gate_up [E, 2 * I, H] (interleaved) and down [E, H, I] of this rank's experts; biases
    [E, 2 * I] and [E, H] or None; shared: fp32 [lanes, M, H], added to each lane last.
    """
    of_lane = len(lanes.experts) // lanes.held
    sums = torch.zeros(lanes.held, len(x), down.shape[1])
    for index, expert in enumerate(lanes.experts):
        rows, choice = torch.where(ids == expert)
        if not len(rows):
            continue
        bias_up, bias_down = (None if bias is None else bias[index] for bias in biases)
        wide = column_gemm(x[rows], gate_up[index], bias_up, torch.float32)
        mixed = activate_and_multiply(wide, x.dtype, activation)
        y = column_gemm(mixed, down[index], bias_down, x.dtype)
        weighted = weights[rows, choice, None] * y.float()
        lane = sums[index // of_lane]
        lane[rows] = lane[rows] + weighted
    if shared is not None:
        sums = sums + shared
    roots = [evaluate(root, lambda lane: sums[lane], torch.add) for root in lanes.roots]
    return PartialSums(torch.stack(roots), tuple(range(len(roots))))
