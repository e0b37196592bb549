"""One-shot exchange: row-parallel sums of all ranks to residual stream and norm, in one kernel.

    t = fold of all ranks' leaf sums        h, y = `finished_rows` of t (`pointwise/finish.py`)

    one-shot   each rank pushes its roots of every row to all peers; everyone finishes every row
    two-shot   roots of row i go to its owner, i // ceil(M / ranks); the owner finishes the row and
               pushes y to all peers; h is known to the owner alone (`two_shot.py`)

Shapes: C sums of this rank's leaves or subtrees, M rows of a step, N values of a row.

    sums [C, M, N] fp32    residual, h, y [M, N]    weights of the norms of a `Finish`
    slots  [2, ranks, roots, rows, N] of 4 bytes in each rank's shared memory

The expression that is evaluated once an element is the plan's (Rule 4), and the norm's sum does not
depend on an order: both kinds give the bits of `finish.fold_and_norm` over gathered sums.
`words.py` says what waits and why nothing is overwritten. Every program polls, so there are never
more than fit the GPU at once (`Peers.programs`). The words that a program waits for are pushed
before their sender waits for anything (one-shot), or in an earlier round of its loop (two-shot), so
every program ends.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import (
    ALL_PHASES,
    OFFSETS,
    WIDEST,
    OwnSums,
    Peers,
    Phases,
    Slots,
)
from tpdet.kernels.cuda.exchange.words import advance, awaited_sum, push_roots, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.pointwise.finish import (
    finish_factors,
    finish_rule,
    finished_rows,
    stream_rows,
)
from tpdet.kernels.fold_program import own_program, rank_program
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

WARP = 32  # threads
_MOST_WARPS = 32  # of a program


@triton.jit(do_not_specialize=["m"])
def one_shot(
    sums,
    stream,
    y,
    links,
    m,
    WORLD: tl.constexpr,
    SLOTS: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    RULE: tl.constexpr,
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Every rank finishes all M rows; a program takes every num_programs-th of them."""
    # 1. Wait for earlier kernels; choose this exchange's set of slots.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    N: tl.constexpr = RULE.n
    columns = tl.arange(0, RULE.block)[None, :]
    present = columns < N
    factors = finish_factors(stream, columns, RULE)
    begin = SLOTS.start + (number % 2) * (WORLD.ranks * SLOTS.roots * SLOTS.rows * N)
    # 2. Push the roots of every row to all peers.
    if PHASES.push:
        target = begin + WORLD.rank * (SLOTS.roots * SLOTS.rows * N)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            push_roots(
                sums,
                at,
                links,
                WORLD.rank + 1,
                WORLD.rank + WORLD.ranks,
                target + at,
                SLOTS.rows * N,
                present,
                SENT,
                WORLD,
            )
    # 3. Fold each row as its words come; add the residual, norm, store.
    if PHASES.fold:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            skipped = tl.load(
                stream.residual + row * stream.stride + columns, mask=present, other=0.0
            )
            total = awaited_sum(
                sums, at, slots, begin + at, SLOTS.rows * N, present, links, number, WHOLE, WORLD
            )
            normed = finished_rows(total, at, skipped, factors, stream.h, present, RULE)
            tl.store(y + at, normed, mask=present)


def run_one_shot(
    sums: PartialSums,
    finish: Finish,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    slots: Slots,
    phases: Phases = ALL_PHASES,
) -> None:
    """Sums [C, M, N], a finish of M rows -> out (h, y) [M, N].

    `phases` may be run apart (tests). Raises ValueError for more rows than the slots have room for,
    and for a row that is too wide.
    """
    m, n = finish.residual.shape
    if m > slots.rows:
        raise ValueError(f"{m} rows: the slots of the one-shot have room for {slots.rows}")
    h, y = out
    one_shot[(min(m, peers.programs),)](
        OwnSums(sums.values, sums.values.stride(0)),
        stream_rows(finish, h),
        y,
        peers.links,
        m,
        **known_of(sums, finish, plan, peers, slots),
        SLOTS=slots,
        PHASES=phases,
        num_warps=peers.warps or one_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )


def known_of(
    sums: PartialSums, finish: Finish, plan: FoldPlan, peers: Peers, slots: Slots
) -> dict[str, Any]:
    """The compile-time arguments that all folding exchanges share; slots: of the roots.

    Raises ValueError for rows that are too wide.
    """
    rows, n = finish.residual.shape
    if rows * n >= OFFSETS:
        raise ValueError(f"sums of {rows * n} values: offsets here have 31 bits")
    check_row(n)
    return {
        "WORLD": peers.world,
        "SENT": own_program(sums.roots),
        "WHOLE": rank_program(plan.final, peers.rank, sums.roots, slots.roots),
        "RULE": finish_rule(finish, n),
    }


def check_row(n: int) -> None:
    """Raise ValueError for rows of more values than exchanges over peer memory take."""
    if n > WIDEST:
        raise ValueError(f"a row of {n} values: peer memory takes at most {WIDEST}, use gather")


def one_shot_warps(n: int) -> int:
    """Warps of a program: four values of a row a thread, for the latency of one row counts."""
    return max(1, min(_MOST_WARPS, next_power_of_2(n) // (4 * WARP)))
