"""Two-shot exchange for few rows: a program a row, so that no program does two things in turn.

Shapes, slots, words and numbering are those of `two_shot.py`: either kernel may follow the other.
Where rows are fewer than multiprocessors, the programs of that kernel push three rows, finish one
and take three, one after the other. Here a program pushes its row to the owner, or finishes it if
this rank owns it, and takes what the owner made of it. Programs push all their rows before they
wait for anything, and finish their own before they wait for rows that others finish, so every
program ends.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, OwnSums, Peers, Phases, Slots
from tpdet.kernels.cuda.exchange.one_shot import known_of, one_shot_warps
from tpdet.kernels.cuda.exchange.two_shot import as_words, push_finished, share_that_fits
from tpdet.kernels.cuda.exchange.words import (
    advance,
    awaited_sum,
    awaited_words,
    push_roots,
    words_of,
)
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.pointwise.finish import finish_factors, finished_rows, stream_rows
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums


@triton.jit(do_not_specialize=["m"])
def two_shot_spread(
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
    PHASES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As `two_shot`, a program a row."""
    # 1. Wait for earlier kernels; choose this exchange's sets of slots.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    N: tl.constexpr = RULE.n
    share = tl.cdiv(m, WORLD.ranks)
    columns = tl.arange(0, RULE.block)[None, :]
    present = columns < N
    begin = ROOTS.start + (number % 2) * (WORLD.ranks * ROOTS.roots * ROOTS.rows * N)
    y_begin = FINISHED.start + (number % 2) * (FINISHED.rows * N)
    # 2. Push the roots of other ranks' rows to their owners.
    if PHASES.push:
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            owner = row // share
            if owner != WORLD.rank:
                push_roots(
                    sums,
                    row * N + columns,
                    links,
                    owner,
                    owner + 1,
                    begin
                    + WORLD.rank * (ROOTS.roots * ROOTS.rows * N)
                    + (row - owner * share) * N
                    + columns,
                    ROOTS.rows * N,
                    present,
                    SENT,
                    WORLD,
                )
    # 3. Finish own rows, and push them to all peers.
    if PHASES.fold:
        slots = words_of(links.table, WORLD.rank, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            if row // share == WORLD.rank:
                at = row * N + columns
                factors = finish_factors(stream, columns, RULE)
                skipped = tl.load(
                    stream.residual + row * stream.stride + columns, mask=present, other=0.0
                )
                total = awaited_sum(
                    sums,
                    at,
                    slots,
                    begin + (row - WORLD.rank * share) * N + columns,
                    ROOTS.rows * N,
                    present,
                    links,
                    number,
                    WHOLE,
                    WORLD,
                )
                normed = finished_rows(total, at, skipped, factors, stream.h, present, RULE)
                push_finished(normed, y_words, links, y_begin, at, present, WORLD)
    # 4. Take the rows that peers finished; number the next exchange.
    if PHASES.take:
        advance(links.counter)
        y_slots = words_of(links.table, WORLD.rank, y_words.dtype.element_ty)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            owner = row // share
            if owner != WORLD.rank:
                at = row * N + columns
                word = awaited_words(y_slots, y_begin + at, present, owner, links, number, WORLD)
                tl.store(y_words + at, word, mask=present)


def run_two_shot_spread(
    sums: PartialSums,
    finish: Finish,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    slots: tuple[Slots, Slots],
    phases: Phases = ALL_PHASES,
) -> None:
    """As `two_shot.run_two_shot`."""
    roots, finished = slots
    m, n = finish.residual.shape
    share_that_fits(m, peers.ranks, roots.rows, finished.rows)
    h, y = out
    two_shot_spread[(min(m, peers.programs),)](
        OwnSums(sums.values, sums.values.stride(0)),
        stream_rows(finish, h),
        as_words(y),
        peers.links,
        m,
        **known_of(sums, finish, plan, peers, roots),
        ROOTS=roots,
        FINISHED=finished,
        PHASES=phases,
        num_warps=peers.warps or one_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )
