"""Where the rows of chosen experts stand: groups of slots, one after another, all on the device.

    ids     int32 [M, k]  experts that a token's row chose; -1 chose none
    slots   int32 [M, k]  the slot of each choice; -1: its expert is not one of this rank's
    blocks  int32 [1 + B] how many blocks of slots there are, then the local expert of each
    counts  int32 [E], starts int32 [E]: choices of each local expert, its first block

A block is `height` slots of one expert; the blocks of an expert are neighbours, and experts ascend.
Places inside an expert's blocks are handed out by an atomic counter: they may differ from run to
run, and no row's value reads another row. Of few tokens (`SPREAD`) a block has a slot for every
token of the step, the token's own, so that products read the step's rows where they are.

One program places up to 4,096 choices. Of more, `count_choices` counts, one program finds the
blocks, and `gather_rows` finds each choice's slot (`gather.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

ONE_PROGRAM = 4096
"""Choices that one program places."""
SPREAD_HEIGHTS = (8, 16)
"""Of blocks that have a slot for every token of the step."""
_BLOCK = 512


class Places(NamedTuple):
    """slots int32 [M, k] and blocks int32 [1 + B] as above; height: slots of a block; spread:
    whether slot `block * height + m` is that of token m."""

    slots: torch.Tensor
    blocks: torch.Tensor
    height: int
    spread: bool

    @property
    def slot_count(self) -> int:
        """Slots of all blocks that there could be."""
        return (self.blocks.shape[0] - 1) * self.height


@triton.jit
def _local(ids, at, here, first, experts):
    """Local experts of choices, and which choices are of one."""
    expert = tl.load(ids + at, mask=here, other=-1) - first
    return expert, here & (expert >= 0) & (expert < experts)


@triton.jit
def _write_blocks(counts, starts, blocks, experts, EXPERTS, HEIGHT, SPREAD):
    """From the counts: each expert's first block, and the expert of each block."""
    expert = tl.arange(0, EXPERTS)
    held = expert < experts
    count = tl.load(counts + expert, mask=held, other=0, cache_modifier=".cg")
    height = tl.minimum(count, 1) if SPREAD else (count + HEIGHT - 1) // HEIGHT
    end = tl.cumsum(height, 0)
    start = end - height
    tl.store(starts + expert, start, mask=held)
    tl.store(blocks, tl.sum(height, 0))
    for i in range(tl.max(height, 0)):
        tl.store(blocks + 1 + start + i, expert, mask=i < height)


@triton.jit(do_not_specialize=["choices", "first"])
def place_few(
    ids,
    counts,
    starts,
    slots,
    blocks,
    choices,
    first,
    experts,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All of it in one program; counts need not be zero before."""
    await_earlier(DEPENDENT)
    # 1. count
    expert_at = tl.arange(0, EXPERTS)
    tl.store(counts + expert_at, 0, mask=expert_at < experts)
    at = tl.arange(0, CHOICES)
    expert, chosen = _local(ids, at, at < choices, first, experts)
    tl.debug_barrier()
    place = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.debug_barrier()
    # 2. the blocks
    _write_blocks(counts, starts, blocks, experts, EXPERTS, HEIGHT, SPREAD)
    tl.debug_barrier()
    # 3. the slot of each choice
    start = tl.load(starts + expert, mask=chosen, other=0, cache_modifier=".cg")
    if SPREAD:
        place = at // CHOSEN
    slot = tl.where(chosen, start * HEIGHT + place, -1)
    tl.store(slots + at, slot, mask=at < choices)


@triton.jit(do_not_specialize=["choices", "first"])
def count_choices(
    ids, counts, slots, choices, first, experts, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """counts (zero before) and, in `slots`, each choice's place among those of its expert."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, chosen = _local(ids, at, at < choices, first, experts)
    place = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.store(slots + at, tl.where(chosen, place, -1), mask=at < choices)


@triton.jit
def find_blocks(
    counts,
    starts,
    blocks,
    experts,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The blocks of counted choices; one program."""
    await_earlier(DEPENDENT)
    _write_blocks(counts, starts, blocks, experts, EXPERTS, HEIGHT, False)


@triton.jit(do_not_specialize=["choices", "first"])
def place_many(
    ids,
    starts,
    slots,
    choices,
    first,
    experts,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """slots: from a place among an expert's choices to the slot."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, chosen = _local(ids, at, at < choices, first, experts)
    start = tl.load(starts + expert, mask=chosen, other=0)
    place = tl.load(slots + at, mask=chosen, other=0)
    tl.store(slots + at, tl.where(chosen, start * HEIGHT + place, -1), mask=at < choices)


def spread_height(tokens: int) -> int:
    """Slots of a spread block for a number of tokens; 0 for more than are spread."""
    return next((height for height in SPREAD_HEIGHTS if tokens <= height), 0)


def empty_places(ids: torch.Tensor, experts: range, height: int, spread: bool) -> Places:
    """Room for the places of ids [M, k], whatever is chosen; slots and blocks are not filled yet.

    spread: a slot for every token in each block; then M <= height. Raises ValueError otherwise.
    """
    (tokens, chosen), count = ids.shape, len(experts)
    if spread and tokens > height:
        raise ValueError(f"{tokens} tokens do not fit blocks of {height} slots: do not spread them")
    choices = tokens * chosen
    most = min(choices, count if spread else choices // height + count)
    slots = torch.empty(tokens, chosen, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(1 + most, dtype=torch.int32, device=ids.device)
    return Places(slots, blocks, height, spread)


def place(ids: torch.Tensor, experts: range, height: int, spread: bool = False) -> Places:
    """ids int32 [M, k], contiguous; this rank's experts -> where their rows stand.

    As `empty_places`, filled.
    """
    found = empty_places(ids, experts, height, spread)
    chosen, choices, count = ids.shape[1], ids.numel(), len(experts)
    counts, starts = (torch.empty(count, dtype=torch.int32, device=ids.device) for _ in range(2))
    if spread or choices <= ONE_PROGRAM:
        padded = next_power_of_2(choices)
        place_few[(1,)](
            ids,
            counts,
            starts,
            found.slots,
            found.blocks,
            choices,
            experts.start,
            count,
            CHOSEN=chosen,
            CHOICES=padded,
            EXPERTS=next_power_of_2(count),
            HEIGHT=height,
            SPREAD=spread,
            num_warps=max(1, min(16, padded // 64)),
            enable_fp_fusion=False,
            **dependent_launch(ids.device),
        )
    else:
        _place_many(ids, counts, starts, found.slots, found.blocks, experts, height)
    return found


def _place_many(
    ids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    experts: range,
    height: int,
) -> None:
    choices, count = slots.numel(), len(experts)
    grid = (cdiv(choices, _BLOCK),)
    count_choices[grid](
        ids,
        counts.zero_(),
        slots,
        choices,
        experts.start,
        count,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(ids.device),
    )
    find_blocks[(1,)](
        counts,
        starts,
        blocks,
        count,
        EXPERTS=next_power_of_2(count),
        HEIGHT=height,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(ids.device),
    )
    place_many[grid](
        ids,
        starts,
        slots,
        choices,
        experts.start,
        count,
        BLOCK=_BLOCK,
        HEIGHT=height,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(ids.device),
    )
