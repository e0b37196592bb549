"""All-gather of a few words over peer memory, and rows of a table that is cut over the peers.

    gather   x [W] int32 of every rank -> gathered [ranks, W]; slots [2, ranks, room] of 8 bytes
    rows     ids [M] int64 -> y [M, N]; rank r holds rows [r * share, (r + 1) * share) of the table

A gathered word travels as 8 bytes, its bits below and the exchange's tag above. They arrive
together, so a tag that is the awaited one vouches for its word (the protocol that NCCL calls LL),
and words may hold any bits. A row is read where it lies: the table does not change, so no rank
waits.

`words.py` says why two buffers are enough. The slots of the gather need not be armed: a tag is used
again only after 2^31 exchanges.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, Buffers, Peers, Phases
from tpdet.kernels.cuda.exchange.words import EPOCHS, advance, next_poll, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2

_BLOCK = 1024  # words that a program awaits at a time
_WIDE_BLOCK = 2048  # values of a row that a program copies at a time
_WORD_BITS = tl.constexpr(32)
_LOW_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["words"])
def gather_words(
    x,
    gathered,
    links,
    words,
    WORLD: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [words] -> gathered [ranks, words]; every program takes every num_programs-th block."""
    # 1. Wait for earlier kernels; choose this exchange's buffer and tag.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    tag = number % EPOCHS + 1
    begin = SLOTS.start + (number % 2) * (WORLD.ranks * SLOTS.room)
    # 2. Push own words, each with the tag, to all peers.
    if PHASES.push:
        for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
            at = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            word = tl.load(x + at, mask=at < words, other=0)
            tl.store(gathered + WORLD.rank * words + at, word, mask=at < words)
            pair = (word.to(tl.int64) & _LOW_WORD) | (tag << _WORD_BITS)
            for ahead in range(1, WORLD.ranks):
                slots = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, tl.int64)
                tl.store(slots + (begin + WORLD.rank * SLOTS.room + at), pair, mask=at < words)
    # 3. Take the words of each peer as their tags come.
    if PHASES.take:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int64)
        for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
            at = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            for behind in range(1, WORLD.ranks):
                source = (WORLD.rank + WORLD.ranks - behind) % WORLD.ranks
                pair = tl.zeros(at.shape, tl.int64)
                waiting = 1
                polls = 0
                deadline = tl.full((), 0, tl.int64)
                while waiting != 0:
                    slot = slots + (begin + source * SLOTS.room + at)
                    pair = tl.load(slot, mask=at < words, other=0, volatile=True)
                    missing = tl.where((pair >> _WORD_BITS != tag) & (at < words), source + 1, 0)
                    waiting, deadline = next_poll(missing, polls, deadline, links, number, WORLD)
                    polls += 1
                tl.store(gathered + source * words + at, pair.to(tl.int32), mask=at < words)


@triton.jit
def rows_of_peers(
    ids,
    part,
    table,
    y,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[i] = fp32 of row ids[i] of [RANKS * SHARE, N]; `table` addresses SHARE rows like part's."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    # An id beyond the table (garbage of a step that lost a peer) must not become a wild address.
    wanted = tl.minimum(tl.maximum(tl.load(ids + row), 0), RANKS * SHARE - 1)
    owner = words_of(table, wanted // SHARE, part.dtype.element_ty)
    for first in tl.static_range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(owner + (wanted % SHARE) * N + at, mask=at < N, other=0)
        tl.store(y + row * N + at, value.to(tl.float32), mask=at < N)


def run_gather(
    x: torch.Tensor,
    gathered: torch.Tensor,
    peers: Peers,
    slots: Buffers,
    phases: Phases = ALL_PHASES,
) -> None:
    """x [W] -> gathered [ranks, W], int32; slots: counted in words of 8 bytes, room a rank's.

    Raises ValueError for more words than the slots have room for.
    """
    words = x.shape[0]
    if words > slots.room:
        raise ValueError(f"{words} words: the slots of the all-gather have room for {slots.room}")
    gather_words[(min(cdiv(words, _BLOCK), peers.programs),)](
        x,
        gathered,
        peers.links,
        words,
        WORLD=peers.world,
        SLOTS=slots,
        BLOCK=_BLOCK,
        PHASES=phases,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def embed_from_peers(ids: torch.Tensor, part: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """fp32 rows [M, N] for ids [M] int64 of a table whose r-th part has the address `table[r]`.

    part: this rank's own [share, N]; all have its shape and dtype.
    """
    rows, n = ids.shape[0], part.shape[1]
    y = torch.empty(rows, n, dtype=torch.float32, device=part.device)
    if rows:
        rows_of_peers[(rows,)](
            ids,
            part,
            table,
            y,
            RANKS=len(table),
            SHARE=part.shape[0],
            N=n,
            BLOCK=min(_WIDE_BLOCK, next_power_of_2(n)),
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(ids.device),
        )
    return y
