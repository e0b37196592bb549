"""Rows cut by columns become whole rows, cut by rows, over peer memory: an all-to-all in a kernel.

Rank t gets the rows from min(t * share, m - share) on, share = ceil(m / ranks) of them: each rank
waits for words of every other, as two buffers in turn need (`words.py`). A rank pushes columns of
a row to where they lie in the whole row, in the slots of the one peer that gets it, and takes the
others' columns of its own rows. Every program pushes all it has before it waits.

A word that has all bits set, a NaN, becomes another NaN.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.columns import disarmed
from tpdet.kernels.cuda.exchange.one_shot import Peers
from tpdet.kernels.cuda.exchange.words import advance, awaited_words, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch

PHASES = ("push", "take")
_TILE = 8192  # words that a program awaits at a time
_WARPS = 8


@triton.jit(do_not_specialize=["m", "share"])
def take_rows(
    x,
    mine,
    table,
    counter,
    control,
    m,
    share,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    START: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PUSH: tl.constexpr,
    TAKE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, PART] -> mine [share, RANKS * PART], int32; two buffers of ROOM words from START."""
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    begin = START + (number % 2) * ROOM
    blocks: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)[None, :]
    if PUSH:
        for tile in range(tl.program_id(0), share * blocks * RANKS, tl.num_programs(0)):
            # Peers in turn: all links are busy at once.
            target = (RANK + 1 + tile % RANKS) % RANKS
            row = tile // RANKS // blocks
            at = (tile // RANKS % blocks) * BLOCK + columns
            first = tl.minimum(target * share, m - share)
            word = tl.load(x + (first + row) * PART + at, mask=at < PART, other=0)
            place = (row * RANKS + RANK) * PART + at
            if target == RANK:
                tl.store(mine + place, disarmed(word), mask=at < PART)
            else:
                slots = words_of(table, target, tl.int32)
                tl.store(slots + (begin + place), disarmed(word), mask=at < PART)
    if TAKE:
        advance(counter)
        slots = words_of(table, RANK, tl.int32)
        sources = tl.arange(0, RANKS)[:, None]
        for tile in range(tl.program_id(0), share * blocks, tl.num_programs(0)):
            at = (tile % blocks) * BLOCK + columns
            wanted = (sources != RANK) & (at < PART)
            place = (tile // blocks * RANKS + sources) * PART + at
            word = awaited_words(slots, begin + place, wanted, sources, control, number, LIVE)
            tl.store(mine + place, word, mask=wanted)


def run_take_rows(
    x: torch.Tensor,
    mine: torch.Tensor,
    peers: Peers,
    place: tuple[int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """x [M, W] -> mine [ceil(M / ranks), ranks * W], both contiguous, of 4 bytes, M at least 1.

    place: first byte of the two buffers, and bytes that each has, both multiples of 16. `phases`
    may be run apart (tests), the last one with "take". Raises ValueError for more than a buffer
    holds.
    """
    size = mine.numel() * 4
    if size > place[1] or max(x.numel(), place[1] // 2) >= 1 << 31:
        raise ValueError(f"{size} bytes of whole rows: a buffer has {place[1]}, take fewer rows")
    m, part = x.shape
    block = min(triton.next_power_of_2(part), _TILE // peers.ranks)
    tiles = len(mine) * triton.cdiv(part, block) * peers.ranks
    take_rows[(min(tiles, peers.programs),)](
        x.view(torch.int32),
        mine.view(torch.int32),
        peers.table,
        peers.counter,
        peers.control,
        m,
        len(mine),
        RANK=peers.rank,
        RANKS=peers.ranks,
        PART=part,
        START=place[0] // 4,
        ROOM=place[1] // 4,
        BLOCK=block,
        PUSH="push" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
