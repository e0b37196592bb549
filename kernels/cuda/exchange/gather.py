"""All-gather of a few words over peer memory, and rows of a table that is cut over the peers.

    gather   a word travels as 8 bytes, its bits below and the exchange's tag above; they arrive
             together, so a tag that is the awaited one vouches for its word (the protocol that
             NCCL calls LL), and words may hold any bits
    rows     an id's row is read where it lies: the table does not change, so nobody waits

For the two buffers of the gather see `words.py`; its slots need not be armed, for a tag is never
used again before 2^31 exchanges have passed.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.one_shot import Peers
from tpdet.kernels.cuda.exchange.words import advance, next_poll, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["words"])
def gather_words(
    x,
    gathered,
    table,
    counter,
    control,
    words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    START: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PUSH: tl.constexpr,
    TAKE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [words] -> gathered [RANKS, words], int32; slots [2, RANKS, ROOM] int64 begin at START."""
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    tag = number % 2147483647 + 1  # never 0, which new memory holds
    begin = START + (number % 2) * (RANKS * ROOM)
    if PUSH:
        for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
            at = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            word = tl.load(x + at, mask=at < words, other=0)
            tl.store(gathered + RANK * words + at, word, mask=at < words)
            pair = (word.to(tl.int64) & 4294967295) | (tag << 32)
            for ahead in range(1, RANKS):
                slots = words_of(table, (RANK + ahead) % RANKS, tl.int64)
                tl.store(slots + (begin + RANK * ROOM + at), pair, mask=at < words)
    if TAKE:
        advance(counter)
        slots = words_of(table, RANK, tl.int64)
        for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
            at = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            for behind in range(1, RANKS):
                source = (RANK + RANKS - behind) % RANKS
                pair = tl.zeros(at.shape, tl.int64)
                waiting = 1
                polls = 0
                deadline = tl.full((), 0, tl.int64)
                while waiting != 0:
                    slot = slots + (begin + source * ROOM + at)
                    pair = tl.load(slot, mask=at < words, other=0, volatile=True)
                    missing = tl.where((pair >> 32 != tag) & (at < words), source + 1, 0)
                    waiting, deadline = next_poll(missing, polls, deadline, control, number, LIVE)
                    polls += 1
                tl.store(gathered + source * words + at, pair.to(tl.int32), mask=at < words)


@triton.jit
def rows_of_peers(
    ids,
    table,
    y,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[i] = row ids[i] of [RANKS * SHARE, N], 4-byte words; `table` addresses SHARE rows each."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    # An id beyond the table (garbage of a step that lost a peer) must not become a wild address.
    wanted = tl.minimum(tl.maximum(tl.load(ids + row), 0), RANKS * SHARE - 1)
    owner = words_of(table, wanted // SHARE, tl.int32)
    for first in tl.static_range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        word = tl.load(owner + (wanted % SHARE) * N + at, mask=at < N, other=0)
        tl.store(y + row * N + at, word, mask=at < N)


def run_gather(
    x: torch.Tensor,
    gathered: torch.Tensor,
    peers: Peers,
    place: tuple[int, int],
    phases: tuple[str, ...] = ("push", "take"),
) -> None:
    """x [W] -> gathered [ranks, W], int32; place: first int64 of the slots, and their room."""
    start, room = place
    words = x.shape[0]
    if words > room:
        raise ValueError(f"{words} words: the slots of the all-gather have room for {room}")
    gather_words[(min(triton.cdiv(words, _BLOCK), peers.programs),)](
        x,
        gathered,
        peers.table,
        peers.counter,
        peers.control,
        words,
        RANK=peers.rank,
        RANKS=peers.ranks,
        START=start,
        ROOM=room,
        BLOCK=_BLOCK,
        PUSH="push" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def embed_from_peers(ids: torch.Tensor, part: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows [M, N] for ids [M] int64 of a table whose r-th part has the address `table[r]`.

    part: this rank's own [share, N]; all have its shape and dtype. Raises ValueError for rows that
    are no whole number of 4-byte words.
    """
    rows, width = ids.shape[0], part.shape[1] * part.element_size()
    if width % 4:
        raise ValueError(f"rows of {width} bytes: peer memory takes multiples of 4")
    y = torch.empty(rows, part.shape[1], dtype=part.dtype, device=part.device)
    if rows:
        n = width // 4
        rows_of_peers[(rows,)](
            ids,
            table,
            y.view(torch.int32),
            RANKS=len(table),
            SHARE=part.shape[0],
            N=n,
            BLOCK=min(2048, triton.next_power_of_2(n)),
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(ids.device),
        )
    return y
