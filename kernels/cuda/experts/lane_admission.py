"""Start-up check of lanes that multiply a shared expert's leaves: held against leaves apart.

Each tile runs on the kinds of data of `trial_data.py` (fp16 does not hold the heavy one), past the
ends of its rows and columns, with padding. One that differs in one byte stops the start.
"""

import torch

from tpdet.kernels.cuda.experts.lane_tiles import LaneTile, streams, tiles
from tpdet.kernels.cuda.experts.lanes import fold_lanes
from tpdet.kernels.cuda.experts.shared_lanes import fold_lanes_with_shared
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.leaf import leaf_gemm
from tpdet.kernels.cuda.pointwise.gate import gate_lanes
from tpdet.kernels.inputs.experts import SharedForm
from tpdet.kernels.inputs.shared_rows import SharedRows

_BLOCK_ROWS = 16
_WIDE = 64 * 160
"""Columns of a trial by programs that stay: more blocks than such programs of a GPU, for one block
of rows, so that one takes several."""


def failing_lanes(form: SharedForm | None, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The tiles, as text, that give other bytes than leaves apart; none without a form."""
    if form is None or not SharedRows.joins(form.leaf, dtype):
        return []
    streamed = streams(_WIDE, form.lanes.held, form.leaf, form.chosen, device)
    kinds = [kind for kind in trial_data.KINDS if kind != "heavy" or dtype != torch.float16]
    return [
        f"lanes with {form.lanes.held} leaves of {form.leaf} {tile}"
        for tile in tiles(streamed)
        if any(_differs(kind, form, tile, device, dtype) for kind in kinds)
    ]


def _differs(
    kind: str, form: SharedForm, tile: LaneTile, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a tile gives other bytes than leaves apart on one kind of data."""
    (experts, _, leaves, _), leaf, chosen = form.lanes, form.leaf, form.chosen
    rows, width = tile.rows + 5, _WIDE if tile.streamed else tile.columns + 8
    ids = torch.arange(chosen, dtype=torch.int32, device=device) * (len(experts) // chosen)
    ids = (ids + experts.start + torch.arange(rows, device=device)[:, None] % 2).int()
    ids[-1] = -1
    slots = sort_tokens(ids, experts, _BLOCK_ROWS)
    y = trial_data.trial_rows(kind, slots.rows, width, device).to(dtype)
    if tile.streamed:
        y[:, 5] = torch.inf  # the program of this column walks twice, the others once
    mixed = trial_data.trial_rows(kind, rows, leaves * leaf, device).to(dtype)
    down = trial_data.trial_weight(kind, leaves * width, leaf, device).to(dtype)
    scores = trial_data.trial_rows("random", rows, chosen + 1, device).float()
    weights, gate = scores[:, :chosen].contiguous(), None
    down = down.view(leaves, width, leaf)
    apart = leaf_gemm(mixed, down)
    if form.gated:
        gate = scores[:, chosen:]
        apart = gate_lanes(apart, gate.contiguous())
    choice = y, ids, weights, slots, form.lanes
    joined = fold_lanes_with_shared(*choice, SharedRows(mixed, down, gate), tile).values
    added = fold_lanes(*choice, apart).values
    return bool((joined.view(torch.int32) != added.view(torch.int32)).any())
