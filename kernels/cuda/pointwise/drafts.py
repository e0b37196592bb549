"""Rows behind drafts on a GPU: a kernel between a step and the one that was launched behind it.

M rows    ids, positions, slots [>= M] int64    spans [B, 3] int32    tables [B, widest] int32
numbers [5 * M + ids expected] int64    sampled int64    moved [M] int64
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.kernels.order import PAGE_TOKENS

_ROWS = 32  # of a program
_PAGE = tl.constexpr(PAGE_TOKENS)
_MOST = tl.constexpr(SHORT_TOKENS - 1)  # unverified drafts of a row


@triton.jit(do_not_specialize=["rows"])
def move_rows(
    ids,
    positions,
    slots,
    spans,
    tables,
    numbers,
    sampled,
    moved,
    rows,
    widest,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: blocks of rows."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    # 1. what the host says of a row
    sequence = tl.load(numbers + row, mask=live, other=0)
    unverified = tl.load(numbers + rows + row, mask=live, other=0)
    token = sampled + tl.load(numbers + 2 * rows + row, mask=live, other=0)
    known = numbers + 5 * rows + tl.load(numbers + 3 * rows + row, mask=live, other=0)
    index = tl.load(numbers + 4 * rows + row, mask=live, other=0)
    # 2. drafts before the first wrong one
    same = live
    accepted = tl.zeros_like(unverified)
    for draft in tl.static_range(_MOST):
        verified = same & (draft < unverified)
        chosen = tl.load(token + draft, mask=verified, other=0)
        same = verified & (chosen == tl.load(known + draft, mask=verified, other=-1))
        accepted += same.to(tl.int64)
    tl.store(moved + row, accepted, mask=live)
    # 3. the row there
    moves = live & (unverified > 0)
    begins = moves & (index == 0)
    behind = tl.load(known + accepted + index, mask=moves & (index > 0), other=0)
    tl.store(ids + row, tl.load(token + accepted, mask=begins, other=behind), mask=moves)
    position = tl.load(positions + row, mask=moves, other=0) + accepted
    tl.store(positions + row, position, mask=moves)
    page = tl.load(tables + sequence * widest + position // _PAGE, mask=moves, other=0)
    tl.store(slots + row, page.to(tl.int64) * _PAGE + position % _PAGE, mask=moves)
    tl.store(spans + sequence * 3 + 2, position.to(tl.int32), mask=begins)


def follow_drafts(
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    spans: torch.Tensor,
    tables: torch.Tensor,
    numbers: torch.Tensor,
    sampled: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    """As the CPU's: move the first M rows of a packed step by the right drafts before them."""
    rows = len(moved)
    move_rows[(cdiv(rows, _ROWS),)](
        ids,
        positions,
        slots,
        spans,
        tables,
        numbers,
        sampled,
        moved,
        rows,
        tables.shape[1],
        BLOCK=_ROWS,
        num_warps=1,
        **dependent_launch(ids.device),
    )
