"""Tokens sorted by expert into blocks of rows, all on the device: what grouped products read.

    ids         int32 [M, k]   experts that a token's row chose; -1 chose none
    counts      int32 [E]      choices of each of this rank's experts
    expert_ids  int32 [1 + B]  how many blocks there are, then the local expert of each
    positions   int32 [M, k]   the row of each choice in the sorted, padded order; -1: its expert is
                               another rank's

An expert's choices fill blocks of `block_rows` rows; its count is padded to whole blocks, the
blocks of an expert are neighbours, and experts ascend. Three tokens, four experts, blocks of two
rows:

    ids               [[0, 2], [0, 3], [0, 2]]
    counts            [3, 0, 2, 1]
    padded counts     [4, 0, 2, 2]
    sorted token ids  [0, 1, 2, -, 0, 2, 1, -]     a row of no token holds anything
    expert_ids        [4,  0, 0, 2, 3]
    positions         [[0, 4], [1, 6], [2, 5]]

(vLLM's moe_align_block_size makes the sorted token ids. `positions` is their inverse: rows are
copied there, and each token's results are read from there.) Of few tokens (`BY_TOKEN_ROWS`) a block
has a row for every token of the step, so that products read the step's rows where they are. The
same with blocks of four rows, by token:

    expert_ids        [3,  0, 2, 3]
    positions         [[0, 4], [1, 9], [2, 6]]     block * 4 + token

Rows inside an expert's blocks are handed out by an atomic counter: they may differ from run to run,
and no row's value reads another row. One program sorts up to 4,096 choices. Of more,
`count_choices` counts, one program finds the blocks, and `position_choices` each choice's row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

ONE_PROGRAM = 4096
"""Choices that one program sorts."""
BY_TOKEN_ROWS = (8, 16)
"""Rows of blocks that have one for every token of the step."""
_BLOCK = 512


class SortedTokens(NamedTuple):
    """positions int32 [M, k] and expert_ids int32 [1 + B] as above; block_rows: rows of a block;
    by_token: whether row `block * block_rows + m` is that of token m."""

    positions: torch.Tensor
    expert_ids: torch.Tensor
    block_rows: int
    by_token: bool

    @property
    def rows(self) -> int:
        """Rows of all blocks that there could be."""
        return (self.expert_ids.shape[0] - 1) * self.block_rows


@triton.jit
def _local(ids, at, here, first, experts):
    """Local experts of choices, and which choices are of one."""
    expert = tl.load(ids + at, mask=here, other=-1) - first
    return expert, here & (expert >= 0) & (expert < experts)


@triton.jit
def _write_blocks(counts, first_blocks, expert_ids, experts, EXPERTS, ROWS, BY_TOKEN):
    """From the counts: each expert's first block, and the expert of each block."""
    expert = tl.arange(0, EXPERTS)
    held = expert < experts
    count = tl.load(counts + expert, mask=held, other=0, cache_modifier=".cg")
    blocks = tl.minimum(count, 1) if BY_TOKEN else (count + ROWS - 1) // ROWS
    end = tl.cumsum(blocks, 0)
    first = end - blocks
    tl.store(first_blocks + expert, first, mask=held)
    tl.store(expert_ids, tl.sum(blocks, 0))
    for i in range(tl.max(blocks, 0)):
        tl.store(expert_ids + 1 + first + i, expert, mask=i < blocks)


@triton.jit(do_not_specialize=["choices", "first"])
def sort_few(
    ids,
    counts,
    first_blocks,
    positions,
    expert_ids,
    choices,
    first,
    experts,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
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
    row = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.debug_barrier()
    # 2. the blocks
    _write_blocks(counts, first_blocks, expert_ids, experts, EXPERTS, ROWS, BY_TOKEN)
    tl.debug_barrier()
    # 3. the row of each choice
    block = tl.load(first_blocks + expert, mask=chosen, other=0, cache_modifier=".cg")
    if BY_TOKEN:
        row = at // CHOSEN
    tl.store(positions + at, tl.where(chosen, block * ROWS + row, -1), mask=at < choices)


@triton.jit(do_not_specialize=["choices", "first"])
def count_choices(
    ids, counts, positions, choices, first, experts, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """counts (zero before) and, in `positions`, each choice's number among those of its expert."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, chosen = _local(ids, at, at < choices, first, experts)
    number = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.store(positions + at, tl.where(chosen, number, -1), mask=at < choices)


@triton.jit
def find_blocks(
    counts,
    first_blocks,
    expert_ids,
    experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The blocks of counted choices; one program."""
    await_earlier(DEPENDENT)
    _write_blocks(counts, first_blocks, expert_ids, experts, EXPERTS, ROWS, False)


@triton.jit(do_not_specialize=["choices", "first"])
def position_choices(
    ids,
    first_blocks,
    positions,
    choices,
    first,
    experts,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """positions: from a number among an expert's choices to the row."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, chosen = _local(ids, at, at < choices, first, experts)
    block = tl.load(first_blocks + expert, mask=chosen, other=0)
    row = tl.load(positions + at, mask=chosen, other=0)
    tl.store(positions + at, tl.where(chosen, block * ROWS + row, -1), mask=at < choices)


def by_token_rows(tokens: int) -> int:
    """Rows of a block by token for a number of tokens; 0 for more than such blocks take."""
    return next((rows for rows in BY_TOKEN_ROWS if tokens <= rows), 0)


def room_for_tokens(
    ids: torch.Tensor, experts: range, block_rows: int, by_token: bool
) -> SortedTokens:
    """Room for the choices of ids [M, k], whatever is chosen; nothing is filled yet.

    by_token: each block has a row for every token, so M <= block_rows. Raises ValueError otherwise.
    """
    (tokens, chosen), count = ids.shape, len(experts)
    if by_token and tokens > block_rows:
        raise ValueError(
            f"{tokens} tokens do not fit blocks of {block_rows} rows: do not take them by token"
        )
    choices = tokens * chosen
    most = min(choices, count if by_token else choices // block_rows + count)
    positions = torch.empty(tokens, chosen, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(1 + most, dtype=torch.int32, device=ids.device)
    return SortedTokens(positions, expert_ids, block_rows, by_token)


def sort_tokens(
    ids: torch.Tensor, experts: range, block_rows: int, by_token: bool = False
) -> SortedTokens:
    """ids int32 [M, k], contiguous, sorted by this rank's experts; as `room_for_tokens`, filled."""
    found = room_for_tokens(ids, experts, block_rows, by_token)
    chosen, choices, count = ids.shape[1], ids.numel(), len(experts)
    counts, first_blocks = (
        torch.empty(count, dtype=torch.int32, device=ids.device) for _ in range(2)
    )
    blocks = {"EXPERTS": next_power_of_2(count), "ROWS": block_rows}
    own, device = (choices, experts.start, count), ids.device
    if by_token or choices <= ONE_PROGRAM:
        padded = next_power_of_2(choices)
        warps = max(1, min(16, padded // 64))
        sort_few[(1,)](
            ids,
            counts,
            first_blocks,
            *found[:2],
            *own,
            CHOSEN=chosen,
            CHOICES=padded,
            BY_TOKEN=by_token,
            **blocks,
            num_warps=warps,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
        return found
    grid, plain = (cdiv(choices, _BLOCK),), {"num_warps": 4, "enable_fp_fusion": False}
    cut, once = {"BLOCK": _BLOCK} | plain, blocks | plain
    count_choices[grid](
        ids, counts.zero_(), found.positions, *own, **cut, **dependent_launch(device)
    )
    find_blocks[(1,)](
        counts, first_blocks, found.expert_ids, count, **once, **dependent_launch(device)
    )
    position_choices[grid](
        ids, first_blocks, found.positions, *own, ROWS=block_rows, **cut, **dependent_launch(device)
    )
    return found
