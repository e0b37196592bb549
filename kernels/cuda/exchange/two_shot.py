"""Two-shot exchange: a row's roots go to its owner, who finishes it and pushes y to all peers.

Shapes: as in `one_shot.py`, and share = ceil(M / ranks) rows that a rank owns.

    roots     slots [2, ranks, roots, share rows, N] of 4 bytes in each rank's shared memory
    finished  slots [2, rows, N] of y's size beside them
    y_words   [M, N]: y as integers of its size

In a round a program pushes its rows of every rank's share, finishes its own rows of the round
before, and takes the peers' finished rows of the one before that. So the link stays busy, and most
words have come before a program waits for them. The arithmetic and the waiting are those of
`one_shot.py`.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import (
    ALL_PHASES,
    OwnSums,
    Peers,
    Phases,
    Slots,
    everyone_owns,
)
from tpdet.kernels.cuda.exchange.one_shot import WARP, known_of
from tpdet.kernels.cuda.exchange.words import (
    ARMED,
    QUIET_16,
    QUIET_32,
    advance,
    awaited_sum,
    awaited_words,
    push_roots,
    words_of,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.pointwise.finish import finish_factors, finished_rows, stream_rows
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

_TAKEN = 1 << 14  # words that a program awaits at a time, 32 a thread
_MOST_WARPS = 16  # of a program


@triton.jit
def push_rows(
    sums,
    links,
    begin,
    first,
    m,
    columns,
    WORLD: tl.constexpr,
    ROOTS: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    SENT: tl.constexpr,
):
    """Push the roots of rows first .. first + TILE of every peer's share to their owner."""
    share = tl.cdiv(m, WORLD.ranks)
    local = first + tl.arange(0, TILE)[:, None]
    for ahead in range(1, WORLD.ranks):
        owner = (WORLD.rank + ahead) % WORLD.ranks
        row = owner * share + local
        push_roots(
            sums,
            row * N + columns,
            links,
            owner,
            owner + 1,
            begin + WORLD.rank * (ROOTS.roots * ROOTS.rows * N) + local * N + columns,
            ROOTS.rows * N,
            (local < share) & (row < m) & (columns < N),
            SENT,
            WORLD,
        )


@triton.jit
def finish_rows(
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
    WORLD: tl.constexpr,
    ROOTS: tl.constexpr,
    WHOLE: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finish own rows first .. first + TILE: (their y, its offsets, which of them exist)."""
    N: tl.constexpr = RULE.n
    share = tl.cdiv(m, WORLD.ranks)
    local = first + tl.arange(0, TILE)[:, None]
    row = WORLD.rank * share + local
    mine = (local < share) & (row < m) & (columns < N)
    at = row * N + columns
    skipped = tl.load(stream.residual + row * stream.stride + columns, mask=mine, other=0.0)
    total = awaited_sum(
        sums,
        at,
        slots,
        begin + local * N + columns,
        ROOTS.rows * N,
        mine,
        links,
        number,
        WHOLE,
        WORLD,
    )
    return finished_rows(total, at, skipped, factors, stream.h, mine, RULE), at, mine


@triton.jit
def push_finished(normed, y_words, links, y_begin, at, mine, WORLD: tl.constexpr):
    """Store finished rows at `at` of the own y, and push them into the y slots of every peer."""
    WORD: tl.constexpr = y_words.dtype.element_ty
    word = normed.to(WORD, bitcast=True)
    tl.store(y_words + at, word, mask=mine)
    quiet: tl.constexpr = QUIET_16 if WORD.primitive_bitwidth == 16 else QUIET_32
    word = tl.where(word == ARMED, quiet, word).to(WORD)
    for ahead in range(1, WORLD.ranks):
        peer = words_of(links.table, (WORLD.rank + ahead) % WORLD.ranks, WORD)
        tl.store(peer + (y_begin + at), word, mask=mine)


@triton.jit(do_not_specialize=["m"])
def two_shot(
    sums,
    stream,
    y_words,
    links,
    m,
    WORLD: tl.constexpr,
    ROOTS: tl.constexpr,
    FINISHED: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Owners finish rows, TILE rows of a share at once, and take those of GROUP peers together.

    TILE and GROUP are powers of two.
    """
    # 1. Wait for earlier kernels; choose this exchange's sets of slots.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    WORD: tl.constexpr = y_words.dtype.element_ty
    ranks: tl.constexpr = WORLD.ranks  # Triton 3.6 asks for a constexpr in static_range
    N: tl.constexpr = RULE.n
    share = tl.cdiv(m, ranks)
    columns = tl.arange(0, RULE.block)[None, :]
    present = columns < N
    factors = finish_factors(stream, columns, RULE)
    begin = ROOTS.start + (number % 2) * (WORLD.ranks * ROOTS.roots * ROOTS.rows * N)
    y_begin = FINISHED.start + (number % 2) * (FINISHED.rows * N)
    slots = words_of(links.table, WORLD.rank, tl.int32)
    y_slots = words_of(links.table, WORLD.rank, WORD)
    rounds = tl.cdiv(share, tl.num_programs(0) * TILE)
    for turn in range(0, rounds + 2):
        first = (turn * tl.num_programs(0) + tl.program_id(0)) * TILE
        # 2. Push the rows of this round to their owners.
        if PHASES.push:  # noqa: SIM102, known when compiled
            if first < share:
                push_rows(sums, links, begin, first, m, columns, WORLD, ROOTS, N, TILE, SENT)
        # 3. Finish own rows of the round before, and push them to all peers.
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
                push_finished(normed, y_words, links, y_begin, at, mine, WORLD)
        # 4. Take the rows that peers finished in the round before that.
        first -= tl.num_programs(0) * TILE
        if PHASES.take:  # noqa: SIM102
            if (first >= 0) & (first < share):
                for first_owner in tl.static_range(0, ranks, GROUP):
                    index = tl.arange(0, GROUP * TILE)[:, None]
                    owners = first_owner + index // TILE
                    local = first + index % TILE
                    theirs = owners * share + local
                    wanted = (owners != WORLD.rank) & (local < share) & (theirs < m) & present
                    at = theirs * N + columns
                    word = awaited_words(
                        y_slots, y_begin + at, wanted, owners, links, number, WORLD
                    )
                    tl.store(y_words + at, word, mask=wanted)
    # 5. Number the next exchange.
    if PHASES.take:
        advance(links.counter)


def run_two_shot(
    sums: PartialSums,
    finish: Finish,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    slots: tuple[Slots, Slots],
    phases: Phases = ALL_PHASES,
) -> None:
    """As `run_one_shot`; of h only the owner's rows are written.

    slots: of the roots, with room for a share, and of y, in words of its size.
    """
    roots, finished = slots
    m, n = finish.residual.shape
    share = share_that_fits(m, peers.ranks, roots.rows, finished.rows)
    h, y = out
    tile = peers.tile or 1
    two_shot[(min(-(-share // tile), peers.programs),)](
        OwnSums(sums.values, sums.values.stride(0)),
        stream_rows(finish, h),
        as_words(y),
        peers.links,
        m,
        **known_of(sums, finish, plan, peers, roots),
        ROOTS=roots,
        FINISHED=finished,
        GROUP=max(1, min(peers.ranks, _TAKEN // tile // next_power_of_2(n))),
        TILE=tile,
        PHASES=phases,
        num_warps=peers.warps or two_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )


def as_words(y: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the values' size."""
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])


def share_that_fits(m: int, ranks: int, share_rows: int, rows: int) -> int:
    """Rows of a rank's share. Raises ValueError where slots lack room or a rank would have none."""
    share = -(-m // ranks)
    if share > share_rows or m > rows:
        raise ValueError(f"{m} rows: the slots of the two-shot have room for {rows}")
    if not everyone_owns(m, ranks):
        raise ValueError(f"{m} rows are too few for {ranks} ranks to own one each")
    return share


def two_shot_warps(n: int) -> int:
    """Warps of a program: eight values of a row a thread."""
    return max(1, min(_MOST_WARPS, next_power_of_2(n) // (8 * WARP)))
