"""Row-parallel sums of all ranks to residual stream and norm, over peer memory, in one kernel.

    t = fold of all ranks' leaf sums        h = round(t + residual)        y = rms_norm(h)

    one-shot   each rank pushes its roots of every row to all peers; everyone finishes every row
    two-shot   roots of row i go to its owner, i // ceil(M / ranks); the owner finishes the row and
               pushes y to all peers; h is known to the owner alone

The expression that is evaluated once an element is the plan's (Rule 4), the norm's sum is free of
order: both give the bits of `norm.fold_and_norm` over gathered sums. What waits, and why nothing is
overwritten, stands in `peer_words`. Every program spins, so there are never more than fit the GPU
at once (`Peers.programs`); the words a program waits for are pushed before their sender waits for
anything (one-shot), or in an earlier round of its loop (two-shot), so all come to their end.

In a round of the two-shot a program pushes the rows of its number in every rank's share, finishes
its own row of the round before, and takes the peers' finished rows of the one before that: the link
stays busy, and what is waited for has mostly come.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.norm import eps_bits, reciprocal_root
from tpdet.kernels.cuda.peer_program import finishing, sending
from tpdet.kernels.cuda.peer_words import (
    ARMED,
    advance,
    awaited_sum,
    awaited_words,
    push_roots,
    words_of,
)
from tpdet.kernels.order import Expression, FoldPlan
from tpdet.kernels.partial_sums import PartialSums

PHASES = ("push", "fold", "take")
_WIDEST = 1 << 14
_TAKEN = 1 << 14  # words that a program awaits at a time, 32 a thread


@dataclass(frozen=True)
class Peers:
    """Where a kernel finds its peers and itself.

    table: int64 [ranks], addresses of everyone's shared memory as seen from here; counter: int64
    [2], zero at first, one for each kind of exchange; control: int64 [2] on this GPU,
    [who was lost, nanoseconds to wait]; programs: how many run at once; warps: of a program, by the
    width of a row if None; tile: rows of a two-shot's program at once, by their number if None;
    live: spin until the words come (else look once, for tests).
    """

    rank: int
    table: torch.Tensor
    counter: torch.Tensor
    control: torch.Tensor
    programs: int
    warps: int | None = None
    tile: int | None = None
    live: bool = True

    @property
    def ranks(self) -> int:
        """How many they are."""
        return self.table.shape[0]


@triton.jit
def finish_row(
    total, at, from_residual, scale, h, present, N: tl.constexpr, EPS_BITS: tl.constexpr
):
    """h = round(total + residual) is stored; returns its norm in h's dtype. One row [1, BLOCK]."""
    value = (total + from_residual.to(tl.float32)).to(h.dtype.element_ty)
    tl.store(h + at, value, mask=present)
    wide = value.to(tl.float32)
    root = reciprocal_root(wide, N, EPS_BITS)
    return ((wide * root[:, None]) * scale.to(tl.float32)).to(h.dtype.element_ty)


@triton.jit(do_not_specialize=["m"])
def one_shot(
    values, residual, weight, h, y, table, counter, control, m, plane, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, EPS_BITS: tl.constexpr,
    START: tl.constexpr, ROWS: tl.constexpr,
    SENT: tl.constexpr, SENT_WHERE: tl.constexpr, SENT_STEPS: tl.constexpr,
    COUNT: tl.constexpr, WHERE: tl.constexpr, STEPS: tl.constexpr,
    PUSH: tl.constexpr, FOLD: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Slots [2, RANKS, SLOTS, ROWS, N] of 4 bytes begin at word START of the shared memory."""
    number = tl.load(counter)
    plane = plane.to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < N
    scale = tl.load(weight + columns, mask=present, other=0.0)
    begin = START + (number % 2) * (RANKS * SLOTS * ROWS * N)
    if PUSH:
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            push_roots(
                values, plane, at, table, RANK + 1, RANK + RANKS,
                begin + RANK * (SLOTS * ROWS * N) + at, ROWS * N, present,
                SENT, SENT_WHERE, SENT_STEPS, RANKS,
            )  # fmt: skip
    if FOLD:
        advance(counter)
        slots = words_of(table, RANK, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            beside = tl.load(residual + row * stride + columns, mask=present, other=0.0)
            total = awaited_sum(
                values, plane, at, slots, begin + at, ROWS * N, present, control, number,
                COUNT, WHERE, STEPS, SLOTS, LIVE,
            )  # fmt: skip
            normed = finish_row(total, at, beside, scale, h, present, N, EPS_BITS)
            tl.store(y + at, normed, mask=present)


@triton.jit(do_not_specialize=["m"])
def two_shot(
    values, residual, weight, h, y_words, table, counter, control, m, plane, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, EPS_BITS: tl.constexpr,
    START: tl.constexpr, ROWS: tl.constexpr, Y_START: tl.constexpr, Y_ROWS: tl.constexpr,
    SENT: tl.constexpr, SENT_WHERE: tl.constexpr, SENT_STEPS: tl.constexpr,
    COUNT: tl.constexpr, WHERE: tl.constexpr, STEPS: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
    PUSH: tl.constexpr, FOLD: tl.constexpr, TAKE: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """As `one_shot`, ROWS of a share; y's words [2, Y_ROWS, N] begin at Y_START, in their size.

    A program takes TILE rows of a share at once, and awaits the finished ones of GROUP peers
    together; both are powers of two.
    """
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
                place = first_place + tl.arange(0, TILE)[:, None]
                for ahead in range(1, RANKS):
                    owner = (RANK + ahead) % RANKS
                    row = owner * share + place
                    sent = (place < share) & (row < m) & present
                    push_roots(
                        values, plane, row * N + columns, table, owner, owner + 1,
                        begin + RANK * (SLOTS * ROWS * N) + place * N + columns,
                        ROWS * N, sent, SENT, SENT_WHERE, SENT_STEPS, RANKS,
                    )  # fmt: skip
        first_place -= tl.num_programs(0) * TILE
        if FOLD:  # noqa: SIM102
            if (first_place >= 0) & (first_place < share) & (RANK * share + first_place < m):
                place = first_place + tl.arange(0, TILE)[:, None]
                row = RANK * share + place
                mine = (place < share) & (row < m) & present
                at = row * N + columns
                beside = tl.load(residual + row * stride + columns, mask=mine, other=0.0)
                total = awaited_sum(
                    values, plane, at, slots, begin + place * N + columns, ROWS * N,
                    mine, control, number, COUNT, WHERE, STEPS, SLOTS, LIVE,
                )  # fmt: skip
                normed = finish_row(total, at, beside, scale, h, mine, N, EPS_BITS)
                word = normed.to(WORD, bitcast=True)
                tl.store(y_words + at, word, mask=mine)
                quiet: tl.constexpr = 0x7FFF if WORD.primitive_bitwidth == 16 else 0x7FFFFFFF
                word = tl.where(word == ARMED, quiet, word).to(WORD)
                for ahead in range(1, RANKS):
                    peer = words_of(table, (RANK + ahead) % RANKS, WORD)
                    tl.store(peer + (y_begin + at), word, mask=mine)
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


def run_one_shot(
    sums: PartialSums,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    place: tuple[int, int],
    phases: tuple[str, ...] = PHASES,
) -> None:
    """Sums [C, M, N], residual [M, N] -> out (h, y) [M, N].

    place: first word of the slots, and rows they have room for. `phases` may be run apart (tests),
    the last one with "fold".
    """
    start, rows = place
    m, n = residual.shape
    if m > rows:
        raise ValueError(f"{m} rows: the slots of the one-shot have room for {rows}")
    h, y = out
    one_shot[(min(m, peers.programs),)](
        sums.values, residual, weight, h, y, peers.table, peers.counter, peers.control,
        m, sums.values.stride(0), residual.stride(0),
        **_shape(sums, plan, peers, n, eps), START=start, ROWS=rows,
        PUSH="push" in phases, FOLD="fold" in phases, LIVE=peers.live,
        num_warps=peers.warps or one_shot_warps(n), enable_fp_fusion=False,
    )  # fmt: skip


def run_two_shot(
    sums: PartialSums,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
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
    share = -(-m // peers.ranks)
    if share > share_rows or m > rows:
        raise ValueError(f"{m} rows: the slots of the two-shot have room for {rows}")
    if not everyone_owns(m, peers.ranks):
        raise ValueError(f"{m} rows are too few for {peers.ranks} ranks to own one each")
    h, y = out
    words = y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
    tile, warps = _tile(n, share, peers)
    two_shot[(min(-(-share // tile), peers.programs),)](
        sums.values, residual, weight, h, words, peers.table, peers.counter, peers.control,
        m, sums.values.stride(0), residual.stride(0),
        **_shape(sums, plan, peers, n, eps),
        START=start, ROWS=share_rows, Y_START=y_start, Y_ROWS=rows,
        GROUP=max(1, min(peers.ranks, _TAKEN // tile // triton.next_power_of_2(n))), TILE=tile,
        PUSH="push" in phases, FOLD="fold" in phases, TAKE="take" in phases, LIVE=peers.live,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def everyone_owns(m: int, ranks: int) -> bool:
    """Whether each rank has a row of its own: in a two-shot all must wait for all."""
    return (ranks - 1) * -(-m // ranks) < m


def _shape(sums: PartialSums, plan: FoldPlan, peers: Peers, n: int, eps: float) -> dict[str, int]:
    """What both kernels know at compile time."""
    if sums.values[0].numel() >= 1 << 31:
        raise ValueError(f"sums of {sums.values[0].numel()} values: offsets here have 31 bits")
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: peer memory takes at most {_WIDEST}, use gather")
    return _programs(sums.roots, plan, peers.rank) | {
        "RANK": peers.rank, "RANKS": peers.ranks, "SLOTS": plan.slots,
        "N": n, "BLOCK": triton.next_power_of_2(n), "EPS_BITS": eps_bits(eps),
    }  # fmt: skip


@cache
def _programs(roots: tuple[Expression, ...], plan: FoldPlan, rank: int) -> dict[str, int]:
    """What a rank sends and what it finishes, as the kernels read it."""
    sent = sending(roots)
    whole = finishing(plan.final, rank, roots, plan.slots)
    return {
        "SENT": sent.count, "SENT_WHERE": sent.where, "SENT_STEPS": sent.steps,
        "COUNT": whole.count, "WHERE": whole.where, "STEPS": whole.steps,
    }  # fmt: skip


def one_shot_warps(n: int) -> int:
    """So many that a thread has four values of a row, at most 32: one row's latency counts."""
    return max(1, min(32, triton.next_power_of_2(n) // 128))


def _warps(n: int) -> int:
    """So many that a thread has eight values of a row, at most 16."""
    return max(1, min(16, triton.next_power_of_2(n) // 256))


def _tile(n: int, share: int, peers: Peers) -> tuple[int, int]:
    """Rows that a program of the two-shot takes at once, and its warps.

    A program mostly waits for memory, so where each has many rows to take it takes two at once, in
    twice the warps: one program a multiprocessor is what the products beside it leave room for.
    """
    warps = _warps(n)
    tile = peers.tile or (2 if share >= 4 * peers.programs and n <= 4096 else 1)
    return tile, peers.warps or warps * min(tile, 2)
