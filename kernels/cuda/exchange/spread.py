"""The two-shot for few rows: a program a row, so that no program does two things in turn.

As `two_shot.py`, with its slots, words and numbering: the two may follow each other. Where rows
are fewer than multiprocessors, that kernel's programs push three rows, finish one and take three,
one after the other; here a program pushes its row to the owner, or finishes it if it is its own,
and takes what the owner made of it. Programs push all their rows before they wait for anything, and
finish their own before they wait for others' finished ones, so all come to their end.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.one_shot import PHASES, Peers, finish_row, known_of, one_shot_warps
from tpdet.kernels.cuda.exchange.two_shot import push_finished, share_that_fits
from tpdet.kernels.cuda.exchange.words import (
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


@triton.jit(do_not_specialize=["m"])
def two_shot_spread(
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
    PUSH: tl.constexpr,
    FOLD: tl.constexpr,
    TAKE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Arguments as of `two_shot`."""
    await_earlier(DEPENDENT)
    number = tl.load(counter)
    plane = plane.to(tl.int64)
    share = tl.cdiv(m, RANKS)
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < N
    begin = START + (number % 2) * (RANKS * SLOTS * ROWS * N)
    y_begin = Y_START + (number % 2) * (Y_ROWS * N)
    if PUSH:
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            owner = row // share
            if owner != RANK:
                push_roots(
                    values,
                    plane,
                    row * N + columns,
                    table,
                    owner,
                    owner + 1,
                    begin + RANK * (SLOTS * ROWS * N) + (row - owner * share) * N + columns,
                    ROWS * N,
                    present,
                    SENT,
                    RANKS,
                )
    if FOLD:
        slots = words_of(table, RANK, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            if row // share == RANK:
                at = row * N + columns
                scale = tl.load(weight + columns, mask=present, other=0.0)
                beside = tl.load(residual + row * stride + columns, mask=present, other=0.0)
                total = awaited_sum(
                    values,
                    plane,
                    at,
                    slots,
                    begin + (row - RANK * share) * N + columns,
                    ROWS * N,
                    present,
                    control,
                    number,
                    WHOLE,
                    LIVE,
                )
                normed = finish_row(total, at, beside, scale, h, present, N, EPS_BITS)
                push_finished(normed, y_words, table, y_begin, at, present, RANK, RANKS)
    if TAKE:
        advance(counter)
        y_slots = words_of(table, RANK, y_words.dtype.element_ty)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            owner = row // share
            if owner != RANK:
                at = row * N + columns
                word = awaited_words(y_slots, y_begin + at, present, owner, control, number, LIVE)
                tl.store(y_words + at, word, mask=present)


def run_two_shot_spread(
    sums: PartialSums,
    residual: torch.Tensor,
    norm: Norm,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    place: tuple[int, int, int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """As `peer_two_shot.run_two_shot`."""
    start, share_rows, y_start, rows = place
    m, n = residual.shape
    share_that_fits(m, peers.ranks, share_rows, rows)
    h, y = out
    words = y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
    two_shot_spread[(min(m, peers.programs),)](
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
        PUSH="push" in phases,
        FOLD="fold" in phases,
        TAKE="take" in phases,
        LIVE=peers.live,
        num_warps=peers.warps or one_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )
