"""Rows cut by columns become whole rows, cut by rows, over peer memory: an all-to-all in a kernel.

Shapes: M rows, share = ceil(M / ranks) of them a rank, PART words of a row that a rank holds.

    x     [M, PART] of every rank        mine  [share, ranks * PART]        4 bytes a word
    a buffer holds [share, ranks * PART] words

Rank t gets share rows, from min(t * share, M - share) on. So each rank waits for words of every
other, as two buffers in turn need (`words.py`). A rank pushes its columns of a row into the slots
of the one peer that gets the row, where they lie as in the whole row, and takes the other ranks'
columns of the rows that it gets. Every program pushes all it has before it waits.

A word that has all bits set, a NaN, becomes another NaN.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, OFFSETS, Buffers, Peers, Phases
from tpdet.kernels.cuda.exchange.columns import disarmed
from tpdet.kernels.cuda.exchange.words import advance, awaited_words, warps_for, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

_TILE = 8192  # words that a program awaits at a time
_WARPS = 8


@triton.jit(do_not_specialize=["m", "share"])
def take_rows(
    x,
    mine,
    links,
    m,
    share,
    WORLD: tl.constexpr,
    BUFFERS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, PART] -> mine [share, ranks * PART], int32; a tile is BLOCK words of one row."""
    # 1. Wait for earlier kernels; choose this exchange's buffer.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    begin = BUFFERS.start + (number % 2) * BUFFERS.room
    blocks: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)[None, :]
    # 2. Push own columns of every row to the rank that gets the row.
    if PHASES.push:
        for tile in range(tl.program_id(0), share * blocks * WORLD.ranks, tl.num_programs(0)):
            # Peers in turn: all links are busy at once.
            target = (WORLD.rank + 1 + tile % WORLD.ranks) % WORLD.ranks
            row = tile // WORLD.ranks // blocks
            at = (tile // WORLD.ranks % blocks) * BLOCK + columns
            first = tl.minimum(target * share, m - share)
            word = tl.load(x + (first + row) * PART + at, mask=at < PART, other=0)
            offset = (row * WORLD.ranks + WORLD.rank) * PART + at
            if target == WORLD.rank:
                tl.store(mine + offset, disarmed(word), mask=at < PART)
            else:
                slots = words_of(links.table, target, tl.int32)
                tl.store(slots + (begin + offset), disarmed(word), mask=at < PART)
    # 3. Take the peers' columns of own rows.
    if PHASES.take:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int32)
        sources = tl.arange(0, WORLD.ranks)[:, None]
        for tile in range(tl.program_id(0), share * blocks, tl.num_programs(0)):
            at = (tile % blocks) * BLOCK + columns
            wanted = (sources != WORLD.rank) & (at < PART)
            offset = (tile // blocks * WORLD.ranks + sources) * PART + at
            word = awaited_words(slots, begin + offset, wanted, sources, links, number, WORLD)
            tl.store(mine + offset, word, mask=wanted)


def run_take_rows(
    x: torch.Tensor, mine: torch.Tensor, peers: Peers, buffers: Buffers, phases: Phases = ALL_PHASES
) -> None:
    """x [M, W] -> mine [ceil(M / ranks), ranks * W], both contiguous, of 4 bytes, M at least 1.

    buffers: in bytes, both multiples of 16. `phases` may be run apart (tests). Raises
    ValueError for more than a buffer holds.
    """
    size = mine.numel() * 4
    if size > buffers.room or max(x.numel(), buffers.room // 2) >= OFFSETS:
        raise ValueError(
            f"{size} bytes of whole rows: a buffer has {buffers.room}, take fewer rows"
        )
    m, part = x.shape
    block = min(next_power_of_2(part), _TILE // peers.ranks)
    tiles = len(mine) * cdiv(part, block) * peers.ranks
    take_rows[(min(tiles, peers.programs),)](
        x.view(torch.int32),
        mine.view(torch.int32),
        peers.links,
        m,
        len(mine),
        WORLD=peers.world,
        BUFFERS=buffers.words(4),
        PART=part,
        BLOCK=block,
        PHASES=phases,
        num_warps=warps_for(peers.ranks * block, _WARPS),
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
