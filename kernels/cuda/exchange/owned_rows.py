"""Some rows of the residual stream, pushed by their owners: afterwards every rank has them.

Shapes: M rows of a step, N values of a row, R rows that are wanted.

    h [M, N] fp32 on every rank, where a row is right on the rank that owns it
    numbers [R] int64, of the rows        whole [R, N] fp32
    a buffer holds [R, N] words, and behind them a word of each rank

Who owns a row follows from its micro-batch as in the exchanges (`two_shot.py`): each piece of one
is cut into shares. Where every rank has the whole piece (`one_shot.py`), one of them pushes it all
the same. Ranks that own no wanted row push their word behind the rows, and every rank awaits the
words of all: so two buffers in turn are enough (`words.py`), and every program pushes all it has
before it waits.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, OFFSETS, Buffers, Peers, Phases
from tpdet.kernels.cuda.exchange.columns import disarmed
from tpdet.kernels.cuda.exchange.words import advance, awaited_words, warps_for, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

_TILE = 2048  # words that a program awaits at a time
_WARPS = 8


@triton.jit
def owner_of(row, first, m, early, late, RANKS: tl.constexpr):
    """The rank that owns a row of a step of `m`, whose first micro-batch has `first` rows.

    early, late: rows of a piece of the first micro-batch and of the second.
    """
    second = row >= first
    local = tl.where(second, row - first, row)
    rows = tl.where(second, m - first, first)
    size = tl.where(second, late, early)
    begin = local // size * size
    share = tl.cdiv(tl.minimum(size, rows - begin), RANKS)
    return ((local - begin) // share).to(tl.int32)


@triton.jit(
    do_not_specialize=["rows", "first", "m", "early", "late"],
    do_not_specialize_on_alignment=["numbers"],  # they may follow ids of any number
)
def push_owned_rows(
    h,
    numbers,
    whole,
    links,
    rows,
    first,
    m,
    early,
    late,
    WORLD: tl.constexpr,
    BUFFERS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h [m, N] -> whole [rows, N], int32; a tile is BLOCK words of one row."""
    # 1. Wait for earlier kernels; choose this exchange's buffer.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    begin = BUFFERS.start + (number % 2) * BUFFERS.room
    behind = begin + BUFFERS.room - WORLD.ranks
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)[None, :]
    sources = tl.arange(0, WORLD.ranks)[None, :]
    # 2. Push the own word, and own rows, to all peers.
    if PHASES.push:
        if tl.program_id(0) == 0:
            for ahead in range(1, WORLD.ranks):
                peer = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, tl.int32)
                tl.store(peer + (behind + WORLD.rank), 0)
        for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
            row = tl.load(numbers + tile // blocks)
            if owner_of(row, first, m, early, late, WORLD.ranks) == WORLD.rank:
                at = (tile % blocks) * BLOCK + columns
                word = disarmed(tl.load(h + row * N + at, mask=at < N, other=0))
                target = (tile // blocks) * N + at
                tl.store(whole + target, word, mask=at < N)
                for ahead in range(1, WORLD.ranks):
                    slots = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, tl.int32)
                    tl.store(slots + (begin + target), word, mask=at < N)
    # 3. Take the words of all peers, and the rows that they own.
    if PHASES.take:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int32)
        if tl.program_id(0) == 0:
            theirs = sources != WORLD.rank
            awaited_words(slots, behind + sources, theirs, sources, links, number, WORLD)
        for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
            row = tl.load(numbers + tile // blocks)
            owner = owner_of(row, first, m, early, late, WORLD.ranks)
            if owner != WORLD.rank:
                at = (tile % blocks) * BLOCK + columns
                target = (tile // blocks) * N + at
                word = awaited_words(slots, begin + target, at < N, owner, links, number, WORLD)
                tl.store(whole + target, word, mask=at < N)


def run_push_owned_rows(
    h: torch.Tensor,
    numbers: torch.Tensor,
    whole: torch.Tensor,
    parts: tuple[tuple[int, int], ...],
    peers: Peers,
    buffers: Buffers,
    phases: Phases = ALL_PHASES,
) -> None:
    """h [M, N] fp32, numbers [R] -> whole [R, N], both contiguous, R at least 1.

    parts: the rows of each micro-batch, of two at most, and of its pieces. buffers: in bytes, both
    multiples of 16. `phases` may be run apart (tests). Raises ValueError for more than a buffer
    holds, and for more micro-batches.
    """
    (m, n), rows = h.shape, len(numbers)
    if (rows * n + peers.ranks) * 4 > buffers.room or max(m * n, buffers.room // 2) >= OFFSETS:
        raise ValueError(f"{rows} rows of {n} values: a buffer has {buffers.room} bytes")
    if len(parts) > 2 or sum(count for count, _ in parts) != m:
        raise ValueError(f"micro-batches {parts} of {m} rows: one or two, which are all of them")
    (first, early), (_, late) = parts[0], parts[-1]
    block = min(_TILE, next_power_of_2(n))
    push_owned_rows[(min(rows * cdiv(n, block), peers.programs),)](
        h.view(torch.int32),
        numbers,
        whole.view(torch.int32),
        peers.links,
        rows,
        first,
        m,
        early,
        late,
        WORLD=peers.world,
        BUFFERS=buffers.words(4),
        N=n,
        BLOCK=block,
        PHASES=phases,
        num_warps=warps_for(block, _WARPS),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )
