"""Two-shot exchange for many rows: owners push finished rows to where their readers read them.

Shapes: as in `two_shot.py`, but y has no slots; it lies in shared memory itself.

    y      [M, N] in everyone's shared memory
    flags  [ranks, programs] of 4 bytes beside it: one for each program of each rank

Slots of y would be awaited word by word, copied out and armed again: with few multiprocessors those
copies took more than half of the time. Here the owner of a row stores its norm into the y of every
rank, its own too. A program that has pushed all its rows raises a flag on every rank, and the
kernel ends when the flags of all have come. A flag is raised by a release and looked at before a
fence of system scope, so whoever reads y after the kernel reads what was pushed.

Two y are taken in turn, and two are enough. A peer pushes a row of exchange d + 2 when it has this
rank's roots of d + 2, and this rank sends those after everything that it launched before, readers
of y(d) among them. A step begins after all readers of the step before, so it may begin with either
y: a captured graph may always use the y that it was captured with, whatever ran before its replay.
The value of a flag is the exchange's number in `counter`, which advances on the device.

The launch is plain, not a dependent one: that gains nothing in steps of a thousand rows.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, Flags, OwnSums, Peers, Phases, Slots
from tpdet.kernels.cuda.exchange.one_shot import known_of
from tpdet.kernels.cuda.exchange.two_shot import (
    finish_rows,
    push_rows,
    share_that_fits,
    two_shot_warps,
)
from tpdet.kernels.cuda.exchange.words import EPOCHS, advance, next_poll, words_of
from tpdet.kernels.cuda.pointwise.finish import finish_factors, stream_rows
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

_TILED = 4096  # values: a wider row takes all registers of a program by itself


@triton.jit
def raise_flags(links, at, epoch, WORLD: tl.constexpr):
    """Raise this program's flag on every peer, once all its threads have stored their rows."""
    tl.debug_barrier()
    for ahead in range(1, WORLD.ranks):
        peer = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, tl.int32)
        tl.atomic_xchg(peer + at, epoch, sem="release", scope="sys")


@triton.jit
def await_flags(flags, stride, epoch, links, number, WORLD: tl.constexpr):
    """Wait until every peer's flag says `epoch`; its rows may be read from then on.

    Or the next one: the program of a peer that ended this exchange and owns no row in the next
    raises its flag for that at once. No peer is further ahead, as it waits for this rank there.
    """
    source = tl.arange(0, WORLD.ranks)[None, :]
    following = ((number + 1) % EPOCHS + 1).to(tl.int32)
    waiting = 1
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while waiting != 0:
        found = tl.load(flags + source * stride, volatile=True)
        come = (found == epoch) | (found == following)
        missing = tl.where((source != WORLD.rank) & ~come, source + 1, 0)
        waiting, deadline = next_poll(missing, polls, deadline, links, number, WORLD)
        polls += 1
    if WORLD.live:  # every thread acquires; Triton 3.6 drops an atomic whose result nobody reads
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;",
            "=r,r",
            [source],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["m"])
def two_shot_direct(
    sums,
    stream,
    links,
    m,
    y_begin,
    WORLD: tl.constexpr,
    ROOTS: tl.constexpr,
    FLAGS: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    PHASES: tl.constexpr,
):
    """y begins at y_begin of everyone's shared memory, counted in values."""
    # 1. Choose this exchange's set of slots and the value of its flags.
    number = tl.load(links.counter)
    epoch = (number % EPOCHS + 1).to(tl.int32)
    N: tl.constexpr = RULE.n
    share = tl.cdiv(m, WORLD.ranks)
    columns = tl.arange(0, RULE.block)[None, :]
    factors = finish_factors(stream, columns, RULE)
    begin = ROOTS.start + (number % 2) * (WORLD.ranks * ROOTS.roots * ROOTS.rows * N)
    y_begin = tl.multiple_of(y_begin.to(tl.int64), 16)
    slots = words_of(links.table, WORLD.rank, tl.int32)
    rounds = tl.cdiv(share, tl.num_programs(0) * TILE)
    for turn in range(0, rounds + 1):
        first = (turn * tl.num_programs(0) + tl.program_id(0)) * TILE
        # 2. Push the rows of this round to their owners.
        if PHASES.push:  # noqa: SIM102, known when compiled
            if first < share:
                push_rows(sums, links, begin, first, m, columns, WORLD, ROOTS, N, TILE, SENT)
        # 3. Finish own rows of the round before; store them in everyone's y.
        first -= tl.num_programs(0) * TILE
        if PHASES.fold:  # noqa: SIM102
            if (first >= 0) & (first < share) & (WORLD.rank * share + first < m):
                normed, at, mine = finish_rows(
                    sums,
                    stream,
                    factors,
                    slots,
                    begin,
                    first,
                    m,
                    columns,
                    links,
                    number,
                    WORLD,
                    ROOTS,
                    WHOLE,
                    RULE,
                    TILE,
                )
                for ahead in range(0, WORLD.ranks):
                    y = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, RULE.dtype)
                    tl.store(y + (y_begin + at), normed, mask=mine)
    # 4. Raise this program's flag on every peer.
    if PHASES.fold:
        at = FLAGS.start + WORLD.rank * FLAGS.programs + tl.program_id(0)
        raise_flags(links, at, epoch, WORLD)
    # 5. Wait for the like program of every peer; number the next exchange.
    if PHASES.take:
        flags = slots + FLAGS.start + tl.program_id(0)
        await_flags(flags, FLAGS.programs, epoch, links, number, WORLD)
        advance(links.counter)


def run_two_shot_direct(
    sums: PartialSums,
    finish: Finish,
    h: torch.Tensor,
    plan: FoldPlan,
    peers: Peers,
    roots: Slots,
    flags: Flags,
    y_begin: int,
    phases: Phases = ALL_PHASES,
) -> None:
    """Sums [C, M, N], a finish of M rows -> h [M, N], of which the owned rows, and everyone's y.

    y_begin: where y begins in everyone's shared memory, in values. `phases` may be run apart
    (tests). Raises ValueError for more rows than the slots have room for.
    """
    m, n = finish.residual.shape
    share = share_that_fits(m, peers.ranks, roots.rows, roots.rows * peers.ranks)
    tile = (peers.tile or 1) if n <= _TILED else 1
    programs = min(-(-share // tile), peers.programs)
    if programs > flags.programs:
        raise ValueError(f"{programs} programs: there are {flags.programs} flags")
    two_shot_direct[(programs,)](
        OwnSums(sums.values, sums.values.stride(0)),
        stream_rows(finish, h),
        peers.links,
        m,
        y_begin,
        **known_of(sums, finish, plan, peers, roots),
        ROOTS=roots,
        FLAGS=flags,
        TILE=tile,
        PHASES=phases,
        num_warps=peers.warps or two_shot_warps(n),
        enable_fp_fusion=False,
    )
