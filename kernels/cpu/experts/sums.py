"""A layer's experts on one rank: from a step's rows and their choice to the roots of its lanes.

    h   = round(act(g) * u), g and u chains over all of H, plus their biases, fp32
    y   = round(chain over all of I, plus its bias)
    lane = (..((+0 + w_a * y_a) + w_b * y_b) ..) [+ shared]      fp32, no fma, ascending ids

Each expert takes the rows that chose it in calls of the bit class (`cpu/gemm/column.py`), so a row
has the bits of a dense product by that expert's weight.

Experts that are cut over their outputs take two calls, `expert_rows` and `sums_of_rows`, with a
gather between.
"""

import torch

from tpdet.kernels.cpu.gemm.column import column_gemm, of_cpu
from tpdet.kernels.cpu.gemm.leaf import leaf_gemm
from tpdet.kernels.cpu.pointwise.activation import activate_and_multiply
from tpdet.kernels.cpu.pointwise.gate import gate_lanes
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.packed import WeightStack
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums


def expert_sums(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: WeightStack,
    down: WeightStack,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None = None,
    activation: str = "silu",
    *,
    sorted_tokens: object = None,
) -> PartialSums:
    """x [M, H], ids int32 and weights fp32 [M, k] -> the roots of this rank's lanes [R, M, H].

    gate_up [E, 2 * I, H] (interleaved) and down [E, H, I] of this rank's experts; biases
    [E, 2 * I] and [E, H] or None; shared: added to each lane last, fp32 [lanes, M, H] or not yet
    multiplied.
    sorted_tokens: of `choose_experts`, which spare a GPU the work.
    """
    mixed = expert_rows(x, ids, gate_up, biases[0], lanes.experts, lanes.total, activation)
    return sums_of_rows(mixed, ids, weights, down, biases[1], lanes, shared)


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: WeightStack,
    bias: torch.Tensor | None,
    experts: range,
    total: int,
    activation: str = "silu",
) -> torch.Tensor:
    """x [M, H], ids [M, k] -> [M, k, I]: what each choice's expert makes of gate and up.

    gate_up [E, 2 * I, H], interleaved, of `experts` of `total`; a choice of none of them has +0.
    """
    mixed, gate_up = x.new_zeros(*ids.shape, gate_up.shape[1] // 2), of_cpu(gate_up)
    for index, expert in enumerate(experts):
        rows, choice = torch.where(ids == expert)
        if len(rows):
            shift = None if bias is None else bias[index]
            wide = column_gemm(x[rows], gate_up[index], shift, torch.float32)
            mixed[rows, choice] = activate_and_multiply(wide, x.dtype, activation)
    return mixed


def sums_of_rows(
    mixed: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    down: WeightStack,
    bias: torch.Tensor | None,
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None = None,
) -> PartialSums:
    """mixed [M, k, I], ids and weights [M, k], down [E, N, I] -> the roots of lanes [R, M, N]."""
    of_lane = len(lanes.experts) // lanes.held
    sums, down = torch.zeros(lanes.held, len(ids), down.shape[1]), of_cpu(down)
    for index, expert in enumerate(lanes.experts):
        rows, choice = torch.where(ids == expert)
        if not len(rows):
            continue
        shift = None if bias is None else bias[index]
        y = column_gemm(mixed[rows, choice], down[index], shift, mixed.dtype)
        lane = sums[index // of_lane]
        lane[rows] = lane[rows] + weights[rows, choice, None] * y.float()
    if shared is not None:
        sums = sums + (_added(shared) if isinstance(shared, SharedRows) else shared)
    roots = [evaluate(root, lambda lane: sums[lane], torch.add) for root in lanes.roots]
    return PartialSums(torch.stack(roots), tuple(range(len(roots))))


def _added(shared: SharedRows) -> torch.Tensor:
    """fp32 [L, M, N]: what each lane gets."""
    mixed, down, gate = shared
    leaves = leaf_gemm(mixed, down)
    return leaves if gate is None else gate_lanes(leaves, gate)
