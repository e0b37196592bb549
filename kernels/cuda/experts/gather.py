"""Rows copied into the slots of their experts, and out of them.

x  [M, K], or [M, k, K] with a row for each choice; slots int32 [M, k] (`places.py`)
y  [S, K]: row m, or the row of each choice, at its slot
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.places import Places
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

_VALUES = 4096  # of a row that a program copies


@triton.jit
def copy_to_slots(
    x,
    slots,
    y,
    width,
    CHOSEN: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A part of one token's row to all of its slots. APART: it has a row for each choice."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    value = tl.load(x + row * (CHOSEN if APART else 1) * width + at, mask=here)
    for choice in tl.static_range(CHOSEN):
        if APART and choice > 0:
            value = tl.load(x + (row * CHOSEN + choice) * width + at, mask=here)
        slot = tl.load(slots + row * CHOSEN + choice)
        if slot >= 0:
            tl.store(y + slot.to(tl.int64) * width + at, value, mask=here)


@triton.jit
def copy_from_slots(
    y, slots, x, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """A part of the rows of one token's choices from their slots; +0 of a choice without one."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    for choice in tl.static_range(CHOSEN):
        slot = tl.load(slots + row * CHOSEN + choice)
        value = tl.load(y + tl.maximum(slot, 0).to(tl.int64) * width + at, mask=here)
        value = tl.where(slot >= 0, value, 0.0)
        tl.store(x + (row * CHOSEN + choice) * width + at, value, mask=here)


def rows_in_slots(x: torch.Tensor, places: Places) -> torch.Tensor:
    """x [M, K] or [M, k, K], contiguous -> [S, K]; slots of no row hold anything."""
    width, chosen = x.shape[-1], places.slots.shape[1]
    y = x.new_empty(places.slot_count, width)
    if y.numel():
        block = min(_VALUES, next_power_of_2(width))
        copy_to_slots[(x.shape[0], cdiv(width, block))](
            x,
            places.slots,
            y,
            width,
            CHOSEN=chosen,
            APART=x.dim() == 3,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(x.device),
        )
    return y


def rows_of_choices(y: torch.Tensor, places: Places) -> torch.Tensor:
    """[S, K] -> [M, k, K]: the row of each choice, +0 where its expert is another rank's."""
    (rows, chosen), width = places.slots.shape, y.shape[1]
    x = y.new_empty(rows, chosen, width)
    if x.numel():
        block = min(_VALUES, next_power_of_2(width))
        copy_from_slots[(rows, cdiv(width, block))](
            y,
            places.slots,
            x,
            width,
            CHOSEN=chosen,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(x.device),
        )
    return x
