"""Lanes: the sums of a token's weighted experts, folded into the roots that a rank sends.

    lane_g = (..((+0 + w_a * y_a) + w_b * y_b) ..) [+ shared_g]     fp32, no fma, ascending ids

    M, k, N   tokens, choices of a token (ids ascend), columns
    ids int32, weights fp32, positions int32 [M, k] (`sorted_tokens.py`); y
    [P, N]: finished rows by their position
    shared    fp32 [L, M, N]: what a shared expert adds to each of this rank's L lanes, or None
    sums      fp32 [R, M, N]: the roots of the rank's fold program over its lanes

A choice of another rank's expert, and a padding row's, has position -1 and is left out by select.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.pointwise.fold import push_and_add
from tpdet.kernels.fold_program import FoldProgram, own_program
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.partial_sums import PartialSums

_FEW_ROWS = 64


@triton.jit
def lane_of(expert, position, first, PER_LANE: tl.constexpr):
    """The lane of a choice, by this rank's first expert; -1 of another rank's expert."""
    return tl.where(position >= 0, (expert - first) // PER_LANE, -1)


@triton.jit
def sum_before(sums_so_far, lanes, lane, finished):
    """What a choice's finished row is added to: the sum before it if that is of its lane, or +0."""
    before = tl.zeros(finished.shape, tl.float32)
    if len(lanes) > 0:
        before = tl.where(lane == lanes[-1], sums_so_far[-1], before)
    return before


@triton.jit
def sum_of_lane(sums_so_far, lanes, lane):
    """The last sum of a lane; +0 of one that no choice is in."""
    total = tl.zeros(sums_so_far[0].shape, tl.float32)
    for choice in tl.static_range(len(lanes)):
        total = tl.where(lanes[choice] == lane, sums_so_far[choice], total)
    return total


@triton.jit(do_not_specialize=["rows", "first"])
def lane_sums(
    y,
    ids,
    weights,
    positions,
    shared,
    sums,
    rows,
    width,
    first,
    CHOSEN: tl.constexpr,
    PER_LANE: tl.constexpr,
    PROGRAM: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block of one token's columns, all lanes. first: this rank's first expert."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    # 1. all weighted rows, read side by side; each is added to those before it in its lane
    sums_so_far = ()
    lanes = ()
    for choice in tl.static_range(CHOSEN):
        choice_index = row * CHOSEN + choice
        position = tl.load(positions + choice_index).to(tl.int64)
        finished = tl.load(y + tl.maximum(position, 0) * width + column, mask=here, other=0.0)
        product = tl.load(weights + choice_index) * finished.to(tl.float32)
        lane = lane_of(tl.load(ids + choice_index), position, first, PER_LANE)
        before = sum_before(sums_so_far, lanes, lane, finished)
        sums_so_far = sums_so_far + (before + product,)  # type: ignore[assignment] # noqa: RUF005
        lanes = lanes + (lane,)  # type: ignore[assignment] # noqa: RUF005
    # 2. a lane is its last sum, and the fold over lanes
    stack = ()
    plane = rows.to(tl.int64) * width
    for i in tl.static_range(len(PROGRAM.planes)):
        total = sum_of_lane(sums_so_far, lanes, PROGRAM.planes[i])
        if HAS_SHARED:
            beside = shared + PROGRAM.planes[i] * plane + row * width + column
            total = total + tl.load(beside, mask=here, other=0.0)
        stack = push_and_add(stack, total, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            tl.store(sums + PROGRAM.roots[i] * plane + row * width + column, stack[0], mask=here)
            stack = stack[1:]


def fold_lanes(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    sorted_tokens: SortedTokens,
    lanes: Lanes,
    shared: torch.Tensor | None = None,
) -> PartialSums:
    """Finished rows [P, N] of this rank's experts -> the roots of its lanes [R, M, N] fp32."""
    experts, roots = lanes.experts, lanes.roots
    (rows, chosen), width = ids.shape, y.shape[1]
    sums = torch.empty(len(roots), rows, width, dtype=torch.float32, device=y.device)
    if sums.numel():
        program: FoldProgram = own_program(roots)
        block = 256 if rows <= _FEW_ROWS else 512
        lane_sums[(rows, cdiv(width, block))](
            y,
            ids,
            weights,
            sorted_tokens.positions,
            sums if shared is None else shared,
            sums,
            rows,
            width,
            experts.start,
            CHOSEN=chosen,
            PER_LANE=len(experts) // lanes.held,
            PROGRAM=program,
            HAS_SHARED=shared is not None,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return PartialSums(sums, tuple(range(len(roots))))
