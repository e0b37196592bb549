"""A layer's experts on one rank: from a step's rows and their choice to the roots of its lanes."""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.gather import rows_in_slots
from tpdet.kernels.cuda.experts.lanes import fold_lanes
from tpdet.kernels.cuda.experts.places import place
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.tiles import LayerTiles, tiles_of
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums


def expert_sums(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    experts: range,
    all_experts: int,
    lanes: int,
    roots: tuple[Expression, ...],
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    tiles: LayerTiles | None = None,
) -> PartialSums:
    """x [M, H], ids int32 and weights fp32 [M, k] -> the roots of this rank's lanes [R, M, H].

    gate_up [E, 2 * I, H] (interleaved) and down [E, H, I] of this rank's `experts` of
    `all_experts`, in `lanes` equal groups; biases [E, 2 * I] and [E, H] or None; roots:
    expressions over these lanes, counted from 0; shared: fp32 [lanes, M, H], added to each lane
    last. tiles: override the static choice; they show in time only.
    """
    wgmma = hardware.gpu_of(x.device).wgmma
    sms = multiprocessors(x.device) if wgmma else 0
    (tokens, chosen), x = ids.shape, x.contiguous()
    if tiles is None:
        tiles = tiles_of(tokens, chosen, all_experts, gate_up, down, sms)
    places = place(ids, experts, tiles.gate_up.rows, tiles.spread)
    rows = x if tiles.spread else rows_in_slots(x, places)
    mixed = grouped_product(
        rows, gate_up, biases[0], places, tiles.gate_up, sms, activation, tiles.spread
    )
    y = grouped_product(mixed, down, biases[1], places, tiles.down, sms)
    return fold_lanes(y, ids, weights, places, experts, roots, lanes, shared)
