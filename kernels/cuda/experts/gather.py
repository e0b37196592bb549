"""Rows copied into the blocks of their experts, and out of them.

x  [M, K], or [M, k, K] with a row for each choice; positions int32 [M, k] (`sorted_tokens.py`)
y  [P, K]: row m, or the row of each choice, at its position
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

_VALUES = 4096  # of a row that a program copies


@triton.jit
def copy_to_blocks(
    x,
    positions,
    y,
    width,
    CHOSEN: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A part of one token's row to all of its positions. APART: it has a row for each choice."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    value = tl.load(x + row * (CHOSEN if APART else 1) * width + at, mask=here)
    for choice in tl.static_range(CHOSEN):
        if APART and choice > 0:
            value = tl.load(x + (row * CHOSEN + choice) * width + at, mask=here)
        position = tl.load(positions + row * CHOSEN + choice)
        if position >= 0:
            tl.store(y + position.to(tl.int64) * width + at, value, mask=here)


@triton.jit
def copy_from_blocks(
    y, positions, x, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """A part of the rows of one token's choices from the blocks; +0 of a choice of none here."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    for choice in tl.static_range(CHOSEN):
        position = tl.load(positions + row * CHOSEN + choice)
        value = tl.load(y + tl.maximum(position, 0).to(tl.int64) * width + at, mask=here)
        value = tl.where(position >= 0, value, 0.0)
        tl.store(x + (row * CHOSEN + choice) * width + at, value, mask=here)


def rows_in_blocks(x: torch.Tensor, sorted_tokens: SortedTokens) -> torch.Tensor:
    """x [M, K] or [M, k, K], contiguous -> [P, K]; rows of no token hold anything."""
    width, chosen = x.shape[-1], sorted_tokens.positions.shape[1]
    y = x.new_empty(sorted_tokens.rows, width)
    if y.numel():
        block = min(_VALUES, next_power_of_2(width))
        copy_to_blocks[(x.shape[0], cdiv(width, block))](
            x,
            sorted_tokens.positions,
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


def rows_of_choices(y: torch.Tensor, sorted_tokens: SortedTokens) -> torch.Tensor:
    """[P, K] -> [M, k, K]: the row of each choice, +0 where its expert is another rank's."""
    (rows, chosen), width = sorted_tokens.positions.shape, y.shape[1]
    x = y.new_empty(rows, chosen, width)
    if x.numel():
        block = min(_VALUES, next_power_of_2(width))
        copy_from_blocks[(rows, cdiv(width, block))](
            y,
            sorted_tokens.positions,
            x,
            width,
            CHOSEN=chosen,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(x.device),
        )
    return x
