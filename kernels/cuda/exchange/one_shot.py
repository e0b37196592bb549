"""Row-parallel sums of all ranks to residual stream and norm, over peer memory, in one kernel.

    t = fold of all ranks' leaf sums        h = round(t + residual)        y = rms_norm(h)

    one-shot   each rank pushes its roots of every row to all peers; everyone finishes every row
    two-shot   roots of row i go to its owner, i // ceil(M / ranks); the owner finishes the row and
               pushes y to all peers; h is known to the owner alone

The expression that is evaluated once an element is the plan's (Rule 4), the norm's sum is free of
order: both give the bits of `norm.fold_and_norm` over gathered sums. What waits, and why nothing is
overwritten, stands in `words.py`. Every program spins, so there are never more than fit the GPU
at once (`Peers.programs`); the words a program waits for are pushed before their sender waits for
anything (one-shot), or in an earlier round of its loop (two-shot), so all come to their end.
The two-shot's kernel is in `two_shot.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.words import advance, awaited_sum, push_roots, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.pointwise.norm import eps_bits, reciprocal_root
from tpdet.kernels.fold_program import FoldProgram, own_program, rank_program
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

PHASES = ("push", "fold", "take")
_WIDEST = 1 << 14


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
    values,
    residual,
    weight,
    h,
    y,
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
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    PUSH: tl.constexpr,
    FOLD: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Slots [2, RANKS, SLOTS, ROWS, N] of 4 bytes begin at word START of the shared memory."""
    await_earlier(DEPENDENT)
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
                values,
                plane,
                at,
                table,
                RANK + 1,
                RANK + RANKS,
                begin + RANK * (SLOTS * ROWS * N) + at,
                ROWS * N,
                present,
                SENT,
                RANKS,
            )
    if FOLD:
        advance(counter)
        slots = words_of(table, RANK, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            beside = tl.load(residual + row * stride + columns, mask=present, other=0.0)
            total = awaited_sum(
                values,
                plane,
                at,
                slots,
                begin + at,
                ROWS * N,
                present,
                control,
                number,
                WHOLE,
                LIVE,
            )
            normed = finish_row(total, at, beside, scale, h, present, N, EPS_BITS)
            tl.store(y + at, normed, mask=present)


def run_one_shot(
    sums: PartialSums,
    residual: torch.Tensor,
    norm: Norm,
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
        sums.values,
        residual,
        norm.weight,
        h,
        y,
        peers.table,
        peers.counter,
        peers.control,
        m,
        sums.values.stride(0),
        residual.stride(0),
        **known_of(sums, plan, peers, n, norm.eps),
        START=start,
        ROWS=rows,
        PUSH="push" in phases,
        FOLD="fold" in phases,
        LIVE=peers.live,
        num_warps=peers.warps or one_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )


def known_of(
    sums: PartialSums, plan: FoldPlan, peers: Peers, n: int, eps: float
) -> dict[str, int | FoldProgram]:
    """What both kernels know at compile time."""
    if sums.values[0].numel() >= 1 << 31:
        raise ValueError(f"sums of {sums.values[0].numel()} values: offsets here have 31 bits")
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: peer memory takes at most {_WIDEST}, use gather")
    return {
        "RANK": peers.rank,
        "RANKS": peers.ranks,
        "SLOTS": plan.slots,
        "N": n,
        "BLOCK": triton.next_power_of_2(n),
        "EPS_BITS": eps_bits(eps),
        "SENT": own_program(sums.roots),
        "WHOLE": rank_program(plan.final, peers.rank, sums.roots, plan.slots),
    }


def one_shot_warps(n: int) -> int:
    """So many that a thread has four values of a row, at most 32: one row's latency counts."""
    return max(1, min(32, triton.next_power_of_2(n) // 128))
