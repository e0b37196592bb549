"""The step's rows, copied into the slots of their experts.

x  [M, K]; slots int32 [M, k] (`places.py`); y [S, K]: row m at each of its slots
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.places import Places
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch

_VALUES = 4096  # of a row that a program copies


@triton.jit
def copy_to_slots(
    x,
    slots,
    y,
    width,
    stride,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A part of one row to all of its slots."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    value = tl.load(x + row * stride + at, mask=here)
    for choice in tl.static_range(CHOSEN):
        slot = tl.load(slots + row * CHOSEN + choice)
        if slot >= 0:
            tl.store(y + slot.to(tl.int64) * width + at, value, mask=here)


def rows_in_slots(x: torch.Tensor, places: Places) -> torch.Tensor:
    """x [M, K] -> [S, K]; slots of no row hold anything."""
    (rows, width), chosen = x.shape, places.slots.shape[1]
    y = x.new_empty(places.slot_count, width)
    if not y.numel():
        return y
    block = min(_VALUES, triton.next_power_of_2(width))
    copy_to_slots[(rows, triton.cdiv(width, block))](
        x,
        places.slots,
        y,
        width,
        x.stride(0),
        CHOSEN=chosen,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
    return y
