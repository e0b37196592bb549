"""Lanes: the sums of a token's weighted experts, folded into the roots that a rank sends.

    lane_g = (..((+0 + w_a * y_a) + w_b * y_b) ..) [+ shared_g]     fp32, no fma, ascending ids

    M, k, N   tokens, choices of a token (ids ascend), columns
    ids int32, weights fp32, slots int32 [M, k]; y [S, N]: finished rows by their slot
    shared    fp32 [L, M, N]: what a shared expert adds to each of this rank's L lanes, or None
    sums      fp32 [R, M, N]: the roots of the rank's fold program over its lanes

A choice of another rank's expert, and a padding row's, has slot -1 and is left out by select.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.places import Places
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.pointwise.fold import push_and_add
from tpdet.kernels.fold_program import FoldProgram, own_program
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums

FEW_ROWS = 64
NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit
def _weighted(y, weights, slots, choice, width, at, here):
    """w * y of one choice, at columns `at`, and its slot; without a slot it is of slot 0."""
    slot = tl.load(slots + choice).to(tl.int64)
    finished = tl.load(y + tl.maximum(slot, 0) * width + at, mask=here, other=0.0)
    return tl.load(weights + choice) * finished.to(tl.float32), slot


@triton.jit(do_not_specialize=["rows", "first"])
def lane_sums(
    y,
    ids,
    weights,
    slots,
    shared,
    sums,
    rows,
    width,
    first,
    CHOSEN: tl.constexpr,
    PER_LANE: tl.constexpr,
    PROGRAM: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    FEW: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block of one token's columns, all lanes. first: this rank's first expert.

    CHOICES: CHOSEN, padded to a power of two.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    # 1. of few tokens, all weighted rows: they are read side by side
    of_row = row * CHOSEN
    choice_at = tl.arange(0, CHOICES)
    experts = tl.load(ids + of_row + choice_at, mask=choice_at < CHOSEN, other=NO_EXPERT)
    products = ()
    lanes = ()
    if FEW:
        for choice in tl.static_range(CHOSEN):
            product, slot = _weighted(y, weights, slots, of_row + choice, width, at, here)
            lane = (tl.load(ids + of_row + choice) - first) // PER_LANE
            products = products + (product,)  # type: ignore[assignment] # noqa: RUF005
            lanes = lanes + (tl.where(slot >= 0, lane, -1),)  # type: ignore[assignment] # noqa: RUF005
    # 2. lane by lane, and the fold over lanes
    stack = ()
    plane = rows.to(tl.int64) * width
    for i in tl.static_range(len(PROGRAM.planes)):
        total = tl.zeros((BLOCK,), tl.float32)
        if FEW:
            for choice in tl.static_range(CHOSEN):
                if lanes[choice] == PROGRAM.planes[i]:
                    total = total + products[choice]
        else:
            bound = first + PROGRAM.planes[i] * PER_LANE
            begin = tl.sum((experts < bound).to(tl.int32), 0)
            end = tl.sum((experts < bound + PER_LANE).to(tl.int32), 0)
            for choice in range(begin, end):
                product, _ = _weighted(y, weights, slots, of_row + choice, width, at, here)
                total = total + product
        if HAS_SHARED:
            beside = shared + PROGRAM.planes[i] * plane + row * width + at
            total = total + tl.load(beside, mask=here, other=0.0)
        stack = push_and_add(stack, total, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            tl.store(sums + PROGRAM.roots[i] * plane + row * width + at, stack[0], mask=here)
            stack = stack[1:]


def fold_lanes(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    places: Places,
    experts: range,
    roots: tuple[Expression, ...],
    lane_count: int,
    shared: torch.Tensor | None = None,
) -> PartialSums:
    """Finished rows [S, N] of this rank's experts -> the roots of its lanes [R, M, N] fp32.

    lane_count: lanes of this rank; roots: expressions over them, counted from 0.
    """
    (rows, chosen), width = ids.shape, y.shape[1]
    sums = torch.empty(len(roots), rows, width, dtype=torch.float32, device=y.device)
    if sums.numel():
        program: FoldProgram = own_program(roots)
        few = rows <= FEW_ROWS
        block = 256 if few else 1024
        lane_sums[(rows, triton.cdiv(width, block))](
            y,
            ids,
            weights,
            places.slots,
            sums if shared is None else shared,
            sums,
            rows,
            width,
            experts.start,
            CHOSEN=chosen,
            PER_LANE=len(experts) // lane_count,
            PROGRAM=program,
            HAS_SHARED=shared is not None,
            FEW=few,
            CHOICES=triton.next_power_of_2(chosen),
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return PartialSums(sums, tuple(range(len(roots))))
