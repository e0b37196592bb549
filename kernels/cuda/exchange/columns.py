"""Columns of all ranks side by side over peer memory: row layers whose ranks add nothing.

    gather_columns    x [M, W] of every rank -> [M, ranks * W]
    gather_and_norm   the same for a row layer's outputs x [M, N / ranks]; then `finished_rows` of
                      every row (`pointwise/finish.py`) on every rank, in the same kernel

Shapes: M rows of a step, N values of a row, PART words of a row that a rank holds; a buffer holds
[M, ranks * PART] words.

Each rank pushes its columns into the slots of all peers, where they lie as in the whole row, and
then takes the columns of the others out of its slots. Words say themselves whether they have come,
and two buffers alternate (`words.py`). Both kernels share buffers and numbering, so they may follow
each other in any order. Every program pushes all it has before it waits, so every program ends.

A word of 4 bytes (2 in `gather_and_norm`, where values are 2 bytes wide) that has all bits set, a
NaN, becomes another NaN on every rank, its sender too.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, OFFSETS, Buffers, Peers, Phases
from tpdet.kernels.cuda.exchange.one_shot import check_row, one_shot_warps
from tpdet.kernels.cuda.exchange.two_shot import as_words, two_shot_warps
from tpdet.kernels.cuda.exchange.words import (
    ARMED,
    QUIET_16,
    QUIET_PAIR,
    advance,
    awaited_words,
    warps_for,
    words_of,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.finish import (
    finish_factors,
    finish_rule,
    finished_rows,
    kernel_dtype,
    stream_rows,
)
from tpdet.kernels.inputs.norm import Finish

_TILE = 2048  # words that a program awaits at a time
_WARPS = 4


@triton.jit
def disarmed(word):
    """The words of data to send: one with all bits set, which would not be seen, becomes a NaN."""
    WORD: tl.constexpr = word.dtype
    quiet: tl.constexpr = QUIET_16 if WORD.primitive_bitwidth == 16 else QUIET_PAIR
    return tl.where(word == ARMED, quiet, word).to(WORD)


@triton.jit(do_not_specialize=["m"])
def gather_columns(
    x,
    gathered,
    links,
    m,
    WORLD: tl.constexpr,
    BUFFERS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, PART] -> gathered [m, ranks * PART], int32; a tile is BLOCK words of one row."""
    # 1. Wait for earlier kernels; choose this exchange's buffer.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    begin = BUFFERS.start + (number % 2) * BUFFERS.room
    blocks: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)[None, :]
    # 2. Push own columns to all peers.
    if PHASES.push:
        for tile in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
            row = tile // blocks
            at = (tile % blocks) * BLOCK + columns
            target = (row * WORLD.ranks + WORLD.rank) * PART + at
            word = disarmed(tl.load(x + row * PART + at, mask=at < PART, other=0))
            tl.store(gathered + target, word, mask=at < PART)
            for ahead in range(1, WORLD.ranks):
                slots = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, tl.int32)
                tl.store(slots + (begin + target), word, mask=at < PART)
    # 3. Take the columns of the peers.
    if PHASES.take:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int32)
        sources = tl.arange(0, WORLD.ranks)[:, None]
        for tile in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
            at = (tile % blocks) * BLOCK + columns
            wanted = (sources != WORLD.rank) & (at < PART)
            target = (tile // blocks * WORLD.ranks + sources) * PART + at
            word = awaited_words(slots, begin + target, wanted, sources, links, number, WORLD)
            tl.store(gathered + target, word, mask=wanted)


@triton.jit(do_not_specialize=["m"])
def gather_and_norm(
    x,
    stream,
    y,
    links,
    m,
    WORLD: tl.constexpr,
    BUFFERS: tl.constexpr,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, N / ranks] of DTYPE, as words of its size -> h, y [m, N]; BUFFERS counts such words."""
    # 1. Wait for earlier kernels; choose this exchange's buffer.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    begin = BUFFERS.start + (number % 2) * BUFFERS.room
    WORD: tl.constexpr = x.dtype.element_ty
    N: tl.constexpr = RULE.n
    PART: tl.constexpr = N // WORLD.ranks
    # 2. Push own columns to all peers.
    if PHASES.push:
        part = tl.arange(0, PART_BLOCK)[None, :]
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            sent = disarmed(tl.load(x + row * PART + part, mask=part < PART, other=0))
            for ahead in range(1, WORLD.ranks):
                peer = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, WORD)
                target = begin + (row * WORLD.ranks + WORLD.rank) * PART
                tl.store(peer + (target + part), sent, mask=part < PART)
    # 3. Take each row whole; add the residual, norm, store.
    if PHASES.take:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, WORD)
        columns = tl.arange(0, RULE.block)[None, :]
        present = columns < N
        owner = columns // PART
        factors = finish_factors(stream, columns, RULE)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            skipped = tl.load(
                stream.residual + row * stream.stride + columns, mask=present, other=0.0
            )
            mine = present & (owner == WORLD.rank)
            own = tl.load(x + row * PART + (columns - WORLD.rank * PART), mask=mine, other=0)
            wanted = present & (owner != WORLD.rank)
            word = awaited_words(slots, begin + at, wanted, owner, links, number, WORLD)
            word = tl.where(mine, disarmed(own), word)
            total = word.to(DTYPE, bitcast=True).to(tl.float32)
            normed = finished_rows(total, at, skipped, factors, stream.h, present, RULE)
            tl.store(y + at, normed, mask=present)


def run_gather_columns(
    x: torch.Tensor,
    gathered: torch.Tensor,
    peers: Peers,
    buffers: Buffers,
    phases: Phases = ALL_PHASES,
) -> None:
    """x [M, W] -> gathered [M, ranks * W], both contiguous, of one dtype, M at least 1.

    buffers: in bytes, both multiples of 16. `phases` may be run apart (tests). Raises
    ValueError for rows that are no whole number of 4-byte words, and for more than a buffer holds.
    """
    if (x.shape[1] * x.element_size()) % 4:
        raise ValueError(f"rows of {x.shape[1]} values of {x.dtype}: use multiples of 4 bytes")
    _check_room(gathered, buffers)
    words, whole = x.view(torch.int32), gathered.view(torch.int32)
    m, part = words.shape
    block = min(next_power_of_2(part), _TILE // peers.ranks)
    tiles = m * cdiv(part, block)
    gather_columns[(min(tiles, peers.programs),)](
        words,
        whole,
        peers.links,
        m,
        WORLD=peers.world,
        BUFFERS=buffers.words(4),
        PART=part,
        BLOCK=block,
        PHASES=phases,
        num_warps=warps_for(peers.ranks * block, _WARPS),
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def run_gather_and_norm(
    x: torch.Tensor,
    finish: Finish,
    out: tuple[torch.Tensor, torch.Tensor],
    peers: Peers,
    buffers: Buffers,
    phases: Phases = ALL_PHASES,
) -> None:
    """x [M, N / ranks], a finish of M rows -> out (h, y) [M, N]; M at least 1.

    As `run_gather_columns`; the residual's rows may lie apart. The bits are those of
    `finish.fold_and_norm` over the whole x.
    """
    (m, n), (h, y) = finish.residual.shape, out
    check_row(n)
    _check_room(y, buffers)
    few = m <= peers.programs
    warps = one_shot_warps(n) if few else two_shot_warps(n)
    gather_and_norm[(min(m, peers.programs),)](
        as_words(x),
        stream_rows(finish, h),
        y,
        peers.links,
        m,
        WORLD=peers.world,
        BUFFERS=buffers.words(x.element_size()),
        RULE=finish_rule(finish, n),
        DTYPE=kernel_dtype(x.dtype),
        PART_BLOCK=next_power_of_2(n // peers.ranks),
        PHASES=phases,
        num_warps=peers.warps or warps,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _check_room(whole: torch.Tensor, buffers: Buffers) -> None:
    """Refuse more than a buffer holds; what passes has offsets of 31 bits."""
    size = whole.numel() * whole.element_size()
    if size > buffers.room or whole.numel() >= OFFSETS:
        raise ValueError(
            f"{size} bytes of whole rows: a buffer has {buffers.room}, take fewer rows"
        )
