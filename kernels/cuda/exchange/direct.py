"""The two-shot for many rows: owners push finished rows to where their readers read them.

As `two_shot.py`, but y has no slots that are awaited word by word, copied out and armed again:
with few multiprocessors those copies took more than half of the time. The owner of a row stores its
norm into the y of every rank, its own too, and a program that has pushed all its rows raises a flag
on every rank; the kernel ends when the flags of all have come. A flag is raised by a release and
seen by an acquire at system scope, so whoever reads y after the kernel reads what was pushed.

Two y take turns, and that is enough: a peer pushes a row of exchange d + 2 when it has this rank's
roots of d + 2, which this rank sends after everything that it launched before, readers of y(d)
among them. A step begins after all readers of the one before, so it may begin with either y: that a
captured graph always uses the y it was captured with does no harm, whatever ran before its replay.
The value of a flag is the exchange's number in `counter`, which advances on the device.

Launched plainly, not as a dependent: it is for steps of a thousand rows, where that gains nothing.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.one_shot import Peers, known_of
from tpdet.kernels.cuda.exchange.two_shot import (
    finish_places,
    push_places,
    share_that_fits,
    two_shot_warps,
)
from tpdet.kernels.cuda.exchange.words import advance, next_poll, words_of
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

PHASES = ("push", "fold", "wait")
_EPOCHS = tl.constexpr((1 << 31) - 1)  # flags hold 1 to this; 0 before the first
_TILED = 4096  # a wider row alone takes the registers that there are


@triton.jit
def raise_flags(table, at, epoch, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell every peer that this program's rows are there, once all its threads have stored them."""
    tl.debug_barrier()
    for ahead in range(1, RANKS):
        peer = words_of(table, (RANK + ahead) % RANKS, tl.int32)
        tl.atomic_xchg(peer + at, epoch, sem="release", scope="sys")


@triton.jit
def await_flags(
    flags,
    stride,
    epoch,
    control,
    number,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LIVE: tl.constexpr,
):
    """Wait until every peer's flag says `epoch`; its rows may be read from then on."""
    source = tl.arange(0, RANKS)[None, :]
    waiting = 1
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while waiting != 0:
        found = tl.load(flags + source * stride, volatile=True)
        missing = tl.where((source != RANK) & (found != epoch), source + 1, 0)
        waiting, deadline = next_poll(missing, polls, deadline, control, number, LIVE)
        polls += 1
    for ahead in range(1, RANKS):
        tl.atomic_add(flags + ((RANK + ahead) % RANKS) * stride, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["m"])
def two_shot_direct(
    values,
    residual,
    weight,
    h,
    table,
    counter,
    control,
    m,
    plane,
    stride,
    y_begin,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS_BITS: tl.constexpr,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    FLAG_START: tl.constexpr,
    FLAG_COUNT: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    PUSH: tl.constexpr,
    FOLD: tl.constexpr,
    WAIT: tl.constexpr,
    LIVE: tl.constexpr,
):
    """Root slots as `two_shot`; y [m, N] begins at y_begin of everyone's shared memory, counted in
    its own size, and flags [RANKS, FLAG_COUNT] of 4 bytes at FLAG_START."""
    number = tl.load(counter)
    epoch = (number % _EPOCHS + 1).to(tl.int32)
    plane = plane.to(tl.int64)
    DTYPE: tl.constexpr = h.dtype.element_ty
    share = tl.cdiv(m, RANKS)
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < N
    scale = tl.load(weight + columns, mask=present, other=0.0)
    begin = START + (number % 2) * (RANKS * SLOTS * ROWS * N)
    y_begin = tl.multiple_of(y_begin.to(tl.int64), 16)
    slots = words_of(table, RANK, tl.int32)
    rounds = tl.cdiv(share, tl.num_programs(0) * TILE)
    for turn in range(0, rounds + 1):
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
                for ahead in range(0, RANKS):
                    y = words_of(table, (RANK + ahead) % RANKS, DTYPE)
                    tl.store(y + (y_begin + at), normed, mask=mine)
    if FOLD:
        raise_flags(table, FLAG_START + RANK * FLAG_COUNT + tl.program_id(0), epoch, RANK, RANKS)
    if WAIT:
        flags = slots + FLAG_START + tl.program_id(0)
        await_flags(flags, FLAG_COUNT, epoch, control, number, RANK, RANKS, LIVE)
        advance(counter)


def run_two_shot_direct(
    sums: PartialSums,
    residual: torch.Tensor,
    norm: Norm,
    h: torch.Tensor,
    plan: FoldPlan,
    peers: Peers,
    place: tuple[int, int, int, int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """Sums [C, M, N], residual [M, N] -> h [M, N], of which the owned rows, and everyone's y.

    place: first word of the root slots and rows of a share they have room for; where y begins,
    counted in its own size; first word of the flags, and how many a rank has. `phases` may be run
    apart (tests), the last one with "wait".
    """
    start, share_rows, y_start, flag_start, flags = place
    m, n = residual.shape
    share = share_that_fits(m, peers.ranks, share_rows, share_rows * peers.ranks)
    tile = (peers.tile or 1) if n <= _TILED else 1
    programs = min(-(-share // tile), peers.programs)
    if programs > flags:
        raise ValueError(f"{programs} programs: there are {flags} flags")
    two_shot_direct[(programs,)](
        sums.values,
        residual,
        norm.weight,
        h,
        peers.table,
        peers.counter,
        peers.control,
        m,
        sums.values.stride(0),
        residual.stride(0),
        y_start,
        **known_of(sums, plan, peers, n, norm.eps),
        START=start,
        ROWS=share_rows,
        FLAG_START=flag_start,
        FLAG_COUNT=flags,
        TILE=tile,
        PUSH="push" in phases,
        FOLD="fold" in phases,
        WAIT="wait" in phases,
        LIVE=peers.live,
        num_warps=peers.warps or two_shot_warps(n),
        enable_fp_fusion=False,
    )
