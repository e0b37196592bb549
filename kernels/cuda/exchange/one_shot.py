"""One-shot exchange: row-parallel sums of all ranks to residual stream and norm, in one kernel.

    t = fold of all ranks' leaf sums        h = t + residual        y = rms_norm(h)

    one-shot   each rank pushes its roots of every row to all peers; everyone finishes every row
    two-shot   roots of row i go to its owner, i // ceil(M / ranks); the owner finishes the row and
               pushes y to all peers; h is known to the owner alone (`two_shot.py`)

Shapes: C sums of this rank's leaves or subtrees, M rows of a step, N values of a row.

    values [C, M, N] fp32    residual, h, y [M, N]    weight of a `Norm`
    slots  [2, ranks, roots, rows, N] of 4 bytes in each rank's shared memory

The expression that is evaluated once an element is the plan's (Rule 4), and the norm's sum does not
depend on an order: both kinds give the bits of `norm.fold_and_norm` over gathered sums. `words.py`
says what waits and why nothing is overwritten. Every program polls, so there are never more than
fit the GPU at once (`Peers.programs`). The words that a program waits for are pushed before their
sender waits for anything (one-shot), or in an earlier round of its loop (two-shot), so every
program ends.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import OFFSETS, WIDEST, KernelWorld, Peers, Slots
from tpdet.kernels.cuda.exchange.words import advance, awaited_sum, push_roots, words_of
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.pointwise.norm import eps_bits, normed_rows
from tpdet.kernels.fold_program import FoldProgram, own_program, rank_program
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import FoldPlan
from tpdet.kernels.partial_sums import PartialSums

PHASES = ("push", "fold", "take")
WARP = 32  # threads
_MOST_WARPS = 32  # of a program


@triton.jit
def finish_row(
    total,
    at,
    from_residual,
    scale,
    shift,
    h,
    present,
    N: tl.constexpr,
    EPS_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYER: tl.constexpr,
):
    """Store h = total + residual in fp32; return its norm in DTYPE; rows [TILE, BLOCK]."""
    value = total + from_residual
    tl.store(h + at, value, mask=present)
    return normed_rows(value, scale, shift, present, N, EPS_BITS, LAYER).to(DTYPE)


@triton.jit
def load_factors(weight, columns, present, N: tl.constexpr, LAYER: tl.constexpr):
    """A norm's factor and, of a layer norm, its bias, else the factor again."""
    scale = tl.load(weight + columns, mask=present, other=0.0)
    shift = scale
    if LAYER:
        shift = tl.load(weight + N + columns, mask=present, other=0.0)
    return scale, shift


@triton.jit(do_not_specialize=["m"])
def one_shot(
    values,
    residual,
    weight,
    h,
    y,
    links,
    m,
    plane,
    stride,
    WORLD: tl.constexpr,
    SLOTS: tl.constexpr,
    SENT: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYER: tl.constexpr,
    PUSH: tl.constexpr,
    FOLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Every rank finishes all M rows; a program takes every num_programs-th of them."""
    # 1. Wait for earlier kernels; choose this exchange's set of slots.
    await_earlier(DEPENDENT)
    number = tl.load(links.counter)
    plane = plane.to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < N
    scale, shift = load_factors(weight, columns, present, N, LAYER)
    begin = SLOTS.start + (number % 2) * (WORLD.ranks * SLOTS.roots * SLOTS.rows * N)
    # 2. Push the roots of every row to all peers.
    if PUSH:
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            push_roots(
                values,
                plane,
                at,
                links,
                WORLD.rank + 1,
                WORLD.rank + WORLD.ranks,
                begin + WORLD.rank * (SLOTS.roots * SLOTS.rows * N) + at,
                SLOTS.rows * N,
                present,
                SENT,
                WORLD,
            )
    # 3. Fold each row as its words come; add the residual, norm, store.
    if FOLD:
        advance(links.counter)
        slots = words_of(links.table, WORLD.rank, tl.int32)
        for row in range(tl.program_id(0), m, tl.num_programs(0)):
            at = row * N + columns
            skipped = tl.load(residual + row * stride + columns, mask=present, other=0.0)
            total = awaited_sum(
                values,
                plane,
                at,
                slots,
                begin + at,
                SLOTS.rows * N,
                present,
                links,
                number,
                WHOLE,
                WORLD,
            )
            normed = finish_row(
                total, at, skipped, scale, shift, h, present, N, EPS_BITS, DTYPE, LAYER
            )
            tl.store(y + at, normed, mask=present)


def run_one_shot(
    sums: PartialSums,
    residual: torch.Tensor,
    norm: Norm,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: FoldPlan,
    peers: Peers,
    slots: Slots,
    phases: tuple[str, ...] = PHASES,
) -> None:
    """Sums [C, M, N], residual [M, N] -> out (h, y) [M, N].

    `phases` may be run apart (tests), the last one with "fold". Raises ValueError for more rows
    than the slots have room for, and for a row that is too wide.
    """
    m, n = residual.shape
    if m > slots.rows:
        raise ValueError(f"{m} rows: the slots of the one-shot have room for {slots.rows}")
    h, y = out
    one_shot[(min(m, peers.programs),)](
        sums.values,
        residual,
        norm.weight,
        h,
        y,
        peers.links,
        m,
        sums.values.stride(0),
        residual.stride(0),
        **known_of(sums, plan, peers, slots, n, norm),
        SLOTS=slots,
        PUSH="push" in phases,
        FOLD="fold" in phases,
        num_warps=peers.warps or one_shot_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )


def known_of(
    sums: PartialSums, plan: FoldPlan, peers: Peers, slots: Slots, n: int, norm: Norm
) -> dict[str, int | FoldProgram | KernelWorld | tl.dtype]:
    """The compile-time arguments that all folding exchanges share; slots: of the roots.

    Raises ValueError for rows that are too wide.
    """
    if sums.values[0].numel() >= OFFSETS:
        raise ValueError(f"sums of {sums.values[0].numel()} values: offsets here have 31 bits")
    if n > WIDEST:
        raise ValueError(f"a row of {n} values: peer memory takes at most {WIDEST}, use gather")
    return {
        "WORLD": peers.world,
        "N": n,
        "BLOCK": next_power_of_2(n),
        "EPS_BITS": eps_bits(norm.eps),
        "DTYPE": kernel_dtype(norm.dtype),
        "LAYER": norm.layer,
        "SENT": own_program(sums.roots),
        "WHOLE": rank_program(plan.final, peers.rank, sums.roots, slots.roots),
    }


def kernel_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype of torch."""
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found


def one_shot_warps(n: int) -> int:
    """Warps of a program: four values of a row a thread, for the latency of one row counts."""
    return max(1, min(_MOST_WARPS, next_power_of_2(n) // (4 * WARP)))
