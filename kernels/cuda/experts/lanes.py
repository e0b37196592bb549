"""Lanes: the sums of a token's weighted experts, folded into the roots that a rank sends.

    lane_g = (..((+0 + w_a * y_a) + w_b * y_b) ..) [+ shared_g]     fp32, no fma, ascending ids

    M, k, N   tokens, choices of a token (ids ascend), columns
    ids int32, weights fp32, slots int32 [M, k]; y [S, N]: finished rows by their slot
    shared    fp32 [L, M, N]: what a shared expert adds to each of this rank's L lanes, or None
    sums      fp32 [R, M, N]: the roots of the rank's fold program over its lanes

A choice of another rank's expert, and a padding row's, has slot -1 and is left out by select.

Where a rank's lanes are the whole fold, the kernel that adds them also adds the residual stream and
norms the row (`lanes_and_norm`): one launch, and no fp32 total that is written and read again.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.places import Places
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.fold import push_and_add
from tpdet.kernels.cuda.pointwise.norm import eps_bits, normed_rows
from tpdet.kernels.fold_program import FoldProgram, own_program
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.partial_sums import PartialSums

_FEW_ROWS = 64
_VALUES_OF_WARP = 256  # 8 a thread, of every choice


@triton.jit
def weighted_rows(
    y,
    ids,
    weights,
    slots,
    row,
    at,
    here,
    width,
    first,
    CHOSEN: tl.constexpr,
    PER_LANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's weighted rows, read side by side, each added to those before it in its lane.

    Two tuples, of a value a choice: the lane's sum so far [BLOCK] fp32, and the lane, or -1.
    """
    sums_so_far = ()
    lanes = ()
    for choice in tl.static_range(CHOSEN):
        at_choice = row * CHOSEN + choice
        slot = tl.load(slots + at_choice).to(tl.int64)
        finished = tl.load(y + tl.maximum(slot, 0) * width + at, mask=here, other=0.0)
        product = tl.load(weights + at_choice) * finished.to(tl.float32)
        lane = tl.where(slot >= 0, (tl.load(ids + at_choice) - first) // PER_LANE, -1)
        before = tl.zeros((BLOCK,), tl.float32)
        if choice > 0:
            before = tl.where(lane == lanes[choice - 1], sums_so_far[choice - 1], before)
        sums_so_far = sums_so_far + (before + product,)  # type: ignore[assignment] # noqa: RUF005
        lanes = lanes + (lane,)  # type: ignore[assignment] # noqa: RUF005
    return sums_so_far, lanes


@triton.jit
def lane_total(sums_so_far, lanes, lane, BLOCK: tl.constexpr):
    """The sum [BLOCK] fp32 of a lane: its last one; +0 where nobody chose it."""
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(len(lanes)):
        total = tl.where(lanes[choice] == lane, sums_so_far[choice], total)
    return total


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
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block of one token's columns, all lanes. first: this rank's first expert."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    # 1. the sums of all choices
    sums_so_far, lanes = weighted_rows(
        y, ids, weights, slots, row, at, here, width, first, CHOSEN, PER_LANE, BLOCK
    )
    # 2. the fold over lanes
    stack = ()
    plane = rows.to(tl.int64) * width
    for i in tl.static_range(len(PROGRAM.planes)):
        total = lane_total(sums_so_far, lanes, PROGRAM.planes[i], BLOCK)
        if HAS_SHARED:
            beside = shared + PROGRAM.planes[i] * plane + row * width + at
            total = total + tl.load(beside, mask=here, other=0.0)
        stack = push_and_add(stack, total, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            tl.store(sums + PROGRAM.roots[i] * plane + row * width + at, stack[0], mask=here)
            stack = stack[1:]


@triton.jit(do_not_specialize=["rows", "first"])
def lanes_and_norm(
    y,
    ids,
    weights,
    slots,
    shared,
    residual,
    scale,
    h,
    normed,
    rows,
    stride,
    first,
    WIDTH: tl.constexpr,
    EPS_BITS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PER_LANE: tl.constexpr,
    PROGRAM: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token: the one root of its lanes, h of it and the residual, the norm of h. See norm.py."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < WIDTH
    # 1. what no choice has a say in, so that it is on its way
    stream = tl.load(residual + row * stride + at, mask=here, other=0.0)
    factor = tl.load(scale + at, mask=here, other=0.0).to(tl.float32)
    shift = factor
    if LAYER:
        shift = tl.load(scale + WIDTH + at, mask=here, other=0.0).to(tl.float32)
    # 2. the sums of all choices, and the fold over lanes
    sums_so_far, lanes = weighted_rows(
        y, ids, weights, slots, row, at, here, WIDTH, first, CHOSEN, PER_LANE, BLOCK
    )
    stack = ()
    plane = rows.to(tl.int64) * WIDTH
    for i in tl.static_range(len(PROGRAM.planes)):
        total = lane_total(sums_so_far, lanes, PROGRAM.planes[i], BLOCK)
        if HAS_SHARED:
            beside = shared + PROGRAM.planes[i] * plane + row * WIDTH + at
            total = total + tl.load(beside, mask=here, other=0.0)
        stack = push_and_add(stack, total, PROGRAM.additions[i])
    # 3. the residual stream and the norm; a weight of NaN reaches no column past the row's end
    value = tl.where(here, stack[0] + stream.to(tl.float32), 0.0)  # type: ignore[misc]
    tl.store(h + row * WIDTH + at, value, mask=here)
    result = normed_rows(
        value[None, :], factor[None, :], shift[None, :], here[None, :], WIDTH, EPS_BITS, LAYER
    )
    rounded = result.to(normed.dtype.element_ty)
    tl.store(normed + row * WIDTH + at[None, :], rounded, mask=here[None, :])


def fold_lanes(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    places: Places,
    lanes: Lanes,
    shared: torch.Tensor | None = None,
) -> PartialSums:
    """Finished rows [S, N] of this rank's experts -> the roots of its lanes [R, M, N] fp32."""
    roots, experts = lanes.roots, lanes.experts
    (rows, chosen), width = ids.shape, y.shape[1]
    sums = torch.empty(len(roots), rows, width, dtype=torch.float32, device=y.device)
    if sums.numel():
        program: FoldProgram = own_program(roots)
        block = 256 if rows <= _FEW_ROWS else 512
        lane_sums[(rows, cdiv(width, block))](
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
            PER_LANE=len(experts) // lanes.held,
            PROGRAM=program,
            HAS_SHARED=shared is not None,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(y.device),
        )
    return PartialSums(sums, tuple(range(len(roots))))


def fold_lanes_and_norm(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    places: Places,
    lanes: Lanes,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finished rows [S, N], residual [M, N] fp32 -> (h fp32, its norm) [M, N]; lanes of one root.

    The bits of `fold_lanes` and then `fold_and_norm` (`pointwise/norm.py`).
    """
    (rows, chosen), width = ids.shape, y.shape[1]
    h = torch.empty(rows, width, dtype=torch.float32, device=y.device)
    normed = torch.empty(rows, width, dtype=norm.dtype, device=y.device)
    if not h.numel():
        return h, normed
    block = next_power_of_2(width)
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    lanes_and_norm[(rows,)](
        y,
        ids,
        weights,
        places.slots,
        h if shared is None else shared,
        residual,
        norm.weight,
        h,
        normed,
        rows,
        residual.stride(0),
        lanes.experts.start,
        WIDTH=width,
        EPS_BITS=eps_bits(norm.eps),
        CHOSEN=chosen,
        PER_LANE=len(lanes.experts) // lanes.held,
        PROGRAM=own_program(lanes.roots),
        HAS_SHARED=shared is not None,
        LAYER=norm.layer,
        BLOCK=block,
        num_warps=max(4, min(block // _VALUES_OF_WARP, 16)),
        enable_fp_fusion=False,
        **dependent_launch(y.device),
    )
    return h, normed
