"""Columns of all ranks side by side over peer memory: row layers whose ranks add nothing.

    gather_columns    [M, W] of every rank -> [M, ranks * W]
    gather_and_norm   the same for a row layer's outputs y; then h = round(y + residual) and its
                      norm, of every row on every rank, in the same kernel

Each rank pushes its columns into the slots of all peers, where they lie as in the whole row, and
then takes the others' out of its own. Words say themselves whether they have come and two buffers
alternate (`words.py`); both kernels share buffers and numbering, so they may follow each other in
any order. Every program pushes all it has before it waits, so all come to their end.

A word of 4 bytes (2 in `gather_and_norm`, where values are 2 bytes wide) that has all bits set, a
NaN, becomes another NaN on every rank, its sender too.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.one_shot import Peers, finish_row, one_shot_warps
from tpdet.kernels.cuda.exchange.words import ARMED, advance, awaited_words, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.pointwise.norm import eps_bits
from tpdet.kernels.inputs.norm import Norm

PHASES = ("push", "take")
_WIDEST = 1 << 14
_TILE = 2048  # words that a program awaits at a time


@triton.jit
def disarmed(word):
    """A word of data that looks like one that has not come -> a NaN that does not."""
    WORD: tl.constexpr = word.dtype
    quiet: tl.constexpr = 0x7FFF if WORD.primitive_bitwidth == 16 else 0x7FFF7FFF
    return tl.where(word == ARMED, quiet, word).to(WORD)


@triton.jit(do_not_specialize=["m"])
def gather_columns(
    x,
    gathered,
    table,
    counter,
    control,
    m,
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
    """x [m, PART] -> gathered [m, RANKS * PART], int32; two buffers of ROOM words from START."""
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    begin = START + (number % 2) * ROOM
    blocks: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)[None, :]
    if PUSH:
        for tile in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
            row = tile // blocks
            at = (tile % blocks) * BLOCK + columns
            place = (row * RANKS + RANK) * PART + at
            word = disarmed(tl.load(x + row * PART + at, mask=at < PART, other=0))
            tl.store(gathered + place, word, mask=at < PART)
            for ahead in range(1, RANKS):
                slots = words_of(table, (RANK + ahead) % RANKS, tl.int32)
                tl.store(slots + (begin + place), word, mask=at < PART)
    if TAKE:
        advance(counter)
        slots = words_of(table, RANK, tl.int32)
        sources = tl.arange(0, RANKS)[:, None]
        for tile in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
            at = (tile % blocks) * BLOCK + columns
            wanted = (sources != RANK) & (at < PART)
            place = (tile // blocks * RANKS + sources) * PART + at
            word = awaited_words(slots, begin + place, wanted, sources, control, number, LIVE)
            tl.store(gathered + place, word, mask=wanted)


@triton.jit(do_not_specialize=["m"])
def gather_and_norm(
    x,
    residual,
    weight,
    h,
    y,
    table,
    counter,
    control,
    m,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    EPS_BITS: tl.constexpr,
    START: tl.constexpr,
    ROOM: tl.constexpr,
    PUSH: tl.constexpr,
    TAKE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, N / RANKS] in words of h's width -> h, y [m, N]; START, ROOM count such words."""
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    begin = START + (number % 2) * ROOM
    WORD: tl.constexpr = x.dtype.element_ty
    PART: tl.constexpr = N // RANKS
    if PUSH:
        part = tl.arange(0, PART_BLOCK)[None, :]
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            sent = disarmed(tl.load(x + row * PART + part, mask=part < PART, other=0))
            for ahead in range(1, RANKS):
                peer = words_of(table, (RANK + ahead) % RANKS, WORD)
                place = begin + (row * RANKS + RANK) * PART
                tl.store(peer + (place + part), sent, mask=part < PART)
    if TAKE:
        advance(counter)
        slots = words_of(table, RANK, WORD)
        columns = tl.arange(0, BLOCK)[None, :]
        present = columns < N
        owner = columns // PART
        scale = tl.load(weight + columns, mask=present, other=0.0)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            beside = tl.load(residual + row * stride + columns, mask=present, other=0.0)
            mine = present & (owner == RANK)
            own = tl.load(x + row * PART + (columns - RANK * PART), mask=mine, other=0)
            wanted = present & (owner != RANK)
            word = awaited_words(slots, begin + at, wanted, owner, control, number, LIVE)
            word = tl.where(mine, disarmed(own), word)
            total = word.to(h.dtype.element_ty, bitcast=True).to(tl.float32)
            normed = finish_row(total, at, beside, scale, h, present, N, EPS_BITS)
            tl.store(y + at, normed, mask=present)


def run_gather_columns(
    x: torch.Tensor,
    gathered: torch.Tensor,
    peers: Peers,
    place: tuple[int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """x [M, W] -> gathered [M, ranks * W], both contiguous, of one dtype, M at least 1.

    place: first byte of the two buffers, and bytes that each has, both multiples of 16. `phases`
    may be run apart (tests), the last one with "take". Raises ValueError for rows that are no
    whole number of 4-byte words, and for more than a buffer holds.
    """
    if (x.shape[1] * x.element_size()) % 4:
        raise ValueError(f"rows of {x.shape[1]} values of {x.dtype}: use multiples of 4 bytes")
    _check_room(gathered, place)
    words, whole = x.view(torch.int32), gathered.view(torch.int32)
    m, part = words.shape
    block = min(triton.next_power_of_2(part), _TILE // peers.ranks)
    tiles = m * triton.cdiv(part, block)
    gather_columns[(min(tiles, peers.programs),)](
        words,
        whole,
        peers.table,
        peers.counter,
        peers.control,
        m,
        RANK=peers.rank,
        RANKS=peers.ranks,
        PART=part,
        START=place[0] // 4,
        ROOM=place[1] // 4,
        BLOCK=block,
        PUSH="push" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def run_gather_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    out: tuple[torch.Tensor, torch.Tensor],
    peers: Peers,
    place: tuple[int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """x [M, N / ranks], residual [M, N], norm [N] -> out (h, y) [M, N]; M at least 1.

    As `run_gather_columns`; the residual's rows may lie apart. The bits are those of
    `norm.fold_and_norm` over the whole x.
    """
    (m, n), (h, y) = residual.shape, out
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: peer memory takes at most {_WIDEST}, use gather")
    _check_room(h, place)
    size = x.element_size()
    few = m <= peers.programs
    wide = triton.next_power_of_2(n)
    warps = one_shot_warps(n) if few else max(1, min(16, wide // 256))
    gather_and_norm[(min(m, peers.programs),)](
        x.view({2: torch.int16, 4: torch.int32}[size]),
        residual,
        norm.weight,
        h,
        y,
        peers.table,
        peers.counter,
        peers.control,
        m,
        residual.stride(0),
        RANK=peers.rank,
        RANKS=peers.ranks,
        N=n,
        BLOCK=wide,
        PART_BLOCK=triton.next_power_of_2(n // peers.ranks),
        EPS_BITS=eps_bits(norm.eps),
        START=place[0] // size,
        ROOM=place[1] // size,
        PUSH="push" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=peers.warps or warps,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _check_room(whole: torch.Tensor, place: tuple[int, int]) -> None:
    """Refuse more than a buffer holds; what passes has offsets of 31 bits."""
    size = whole.numel() * whole.element_size()
    if size > place[1] or whole.numel() >= 1 << 31:
        raise ValueError(f"{size} bytes of whole rows: a buffer has {place[1]}, take fewer rows")
