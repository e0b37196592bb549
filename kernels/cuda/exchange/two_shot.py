"""The two-shot exchange: a row's roots go to its owner, who finishes it and pushes y to all peers.

In a round a program pushes the rows of its number in every rank's share, finishes its own rows of
the round before, and takes the peers' finished rows of the one before that: the link stays busy,
and what is waited for has mostly come. The arithmetic and the waiting are those of `one_shot.py`.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.one_shot import PHASES, Peers, finish_row, known_of
from tpdet.kernels.cuda.exchange.words import (
    ARMED,
    advance,
    awaited_sum,
    awaited_words,
    push_roots,
    words_of,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

_TAKEN = 1 << 14  # words that a program awaits at a time, 32 a thread


@triton.jit
def push_places(
    values,
    plane,
    table,
    begin,
    first_place,
    share,
    m,
    columns,
    present,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SENT: tl.constexpr,
):
    """Push the roots of TILE rows of every peer's share, from `first_place` on, to their owner."""
    place = first_place + tl.arange(0, TILE)[:, None]
    for ahead in range(1, RANKS):
        owner = (RANK + ahead) % RANKS
        row = owner * share + place
        sent = (place < share) & (row < m) & present
        push_roots(
            values,
            plane,
            row * N + columns,
            table,
            owner,
            owner + 1,
            begin + RANK * (SLOTS * ROWS * N) + place * N + columns,
            ROWS * N,
            sent,
            SENT,
            RANKS,
        )


@triton.jit
def finish_places(
    values,
    plane,
    residual,
    stride,
    scale,
    h,
    slots,
    begin,
    first_place,
    share,
    m,
    columns,
    present,
    control,
    number,
    RANK: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    EPS_BITS: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    LIVE: tl.constexpr,
):
    """Finish TILE own rows from `first_place` on: (their norm, where they stand, which count)."""
    place = first_place + tl.arange(0, TILE)[:, None]
    row = RANK * share + place
    mine = (place < share) & (row < m) & present
    at = row * N + columns
    beside = tl.load(residual + row * stride + columns, mask=mine, other=0.0)
    total = awaited_sum(
        values,
        plane,
        at,
        slots,
        begin + place * N + columns,
        ROWS * N,
        mine,
        control,
        number,
        WHOLE,
        LIVE,
    )
    return finish_row(total, at, beside, scale, h, mine, N, EPS_BITS), at, mine


@triton.jit
def push_finished(
    normed, y_words, table, y_begin, at, mine, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Store finished rows at `at` of the own y, and push them into the y slots of every peer."""
    WORD: tl.constexpr = y_words.dtype.element_ty
    word = normed.to(WORD, bitcast=True)
    tl.store(y_words + at, word, mask=mine)
    quiet: tl.constexpr = 0x7FFF if WORD.primitive_bitwidth == 16 else 0x7FFFFFFF
    word = tl.where(word == ARMED, quiet, word).to(WORD)
    for ahead in range(1, RANKS):
        peer = words_of(table, (RANK + ahead) % RANKS, WORD)
        tl.store(peer + (y_begin + at), word, mask=mine)


@triton.jit(do_not_specialize=["m"])
def two_shot(
    values,
    residual,
    weight,
    h,
    y_words,
    table,
    counter,
    control,
    m,
    plane,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS_BITS: tl.constexpr,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    Y_START: tl.constexpr,
    Y_ROWS: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PUSH: tl.constexpr,
    FOLD: tl.constexpr,
    TAKE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As `one_shot`, ROWS of a share; y's words [2, Y_ROWS, N] begin at Y_START, in their size.

    A program takes TILE rows of a share at once, and awaits the finished ones of GROUP peers
    together; both are powers of two.
    """
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    plane = plane.to(tl.int64)
    WORD: tl.constexpr = y_words.dtype.element_ty
    share = tl.cdiv(m, RANKS)
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < N
    scale = tl.load(weight + columns, mask=present, other=0.0)
    begin = START + (number % 2) * (RANKS * SLOTS * ROWS * N)
    y_begin = Y_START + (number % 2) * (Y_ROWS * N)
    slots = words_of(table, RANK, tl.int32)
    y_slots = words_of(table, RANK, WORD)
    rounds = tl.cdiv(share, tl.num_programs(0) * TILE)
    for turn in range(0, rounds + 2):
        first_place = (turn * tl.num_programs(0) + tl.program_id(0)) * TILE
        if PUSH:  # noqa: SIM102, known when compiled
            if first_place < share:
                push_places(
                    values,
                    plane,
                    table,
                    begin,
                    first_place,
                    share,
                    m,
                    columns,
                    present,
                    RANK,
                    RANKS,
                    SLOTS,
                    N,
                    ROWS,
                    TILE,
                    SENT,
                )
        first_place -= tl.num_programs(0) * TILE
        if FOLD:  # noqa: SIM102
            if (first_place >= 0) & (first_place < share) & (RANK * share + first_place < m):
                normed, at, mine = finish_places(
                    values,
                    plane,
                    residual,
                    stride,
                    scale,
                    h,
                    slots,
                    begin,
                    first_place,
                    share,
                    m,
                    columns,
                    present,
                    control,
                    number,
                    RANK,
                    N,
                    ROWS,
                    EPS_BITS,
                    TILE,
                    WHOLE,
                    LIVE,
                )
                push_finished(normed, y_words, table, y_begin, at, mine, RANK, RANKS)
        first_place -= tl.num_programs(0) * TILE
        if TAKE:  # noqa: SIM102
            if (first_place >= 0) & (first_place < share):
                for first in tl.static_range(0, RANKS, GROUP):
                    index = tl.arange(0, GROUP * TILE)[:, None]
                    owners = first + index // TILE
                    place = first_place + index % TILE
                    theirs = owners * share + place
                    wanted = (owners != RANK) & (place < share) & (theirs < m) & present
                    at = theirs * N + columns
                    word = awaited_words(
                        y_slots, y_begin + at, wanted, owners, control, number, LIVE
                    )
                    tl.store(y_words + at, word, mask=wanted)
    if TAKE:
        advance(counter)


def run_two_shot(
    sums: PartialSums,
    residual: torch.Tensor,
    norm: Norm,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    place: tuple[int, int, int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """As `run_one_shot`; of h only the owner's rows are written.

    place: first word of the root slots and rows of a share they have room for; first word of the
    slots of y, counted in its own size, and their rows. The last phase is "take".
    """
    start, share_rows, y_start, rows = place
    m, n = residual.shape
    share = share_that_fits(m, peers.ranks, share_rows, rows)
    h, y = out
    words = y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
    tile = peers.tile or 1
    two_shot[(min(-(-share // tile), peers.programs),)](
        sums.values,
        residual,
        norm.weight,
        h,
        words,
        peers.table,
        peers.counter,
        peers.control,
        m,
        sums.values.stride(0),
        residual.stride(0),
        **known_of(sums, plan, peers, n, norm.eps),
        START=start,
        ROWS=share_rows,
        Y_START=y_start,
        Y_ROWS=rows,
        GROUP=max(1, min(peers.ranks, _TAKEN // tile // triton.next_power_of_2(n))),
        TILE=tile,
        PUSH="push" in phases,
        FOLD="fold" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=peers.warps or two_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )


def everyone_owns(m: int, ranks: int) -> bool:
    """Whether each rank has a row of its own: in a two-shot all must wait for all."""
    return (ranks - 1) * -(-m // ranks) < m


def share_that_fits(m: int, ranks: int, share_rows: int, rows: int) -> int:
    """Rows of a rank's share. Raises ValueError where slots lack room or a rank would have none."""
    share = -(-m // ranks)
    if share > share_rows or m > rows:
        raise ValueError(f"{m} rows: the slots of the two-shot have room for {rows}")
    if not everyone_owns(m, ranks):
        raise ValueError(f"{m} rows are too few for {ranks} ranks to own one each")
    return share


def two_shot_warps(n: int) -> int:
    """So many that a thread has eight values of a row, at most 16."""
    return max(1, min(16, triton.next_power_of_2(n) // 256))
