"""The end of a block's sums on a GPU: the residual stream with them, and its norm, row by row.

    h = total + residual      round(behind(total)) + residual, where a norm stands behind the block
    y = round(norm(h))        round(h), without a norm before the next block

Each addition is rounded to fp32. `fold_and_norm` does it to sums that are here, and the exchanges,
by `finished_rows`, to sums that ranks send each other.

Shapes: M rows, N values of a row, C fp32 sums that are folded.

    residual, h, y [M, N]    weights of a `Norm`    sums [C, M, N] fp32
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.fold import folded_operands
from tpdet.kernels.cuda.pointwise.norm import (
    FORMULAS,
    NO_NORM,
    check_width,
    eps_bits,
    load_factors,
    norm_warps,
    normed_rows,
)
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.partial_sums import PartialSums


class StreamRows(NamedTuple):
    """What a kernel reads and writes of the stream, given at run time.

    residual: fp32 [M, N], its rows `stride` values apart; h: fp32 [M, N]. weight: of the norm of h;
    behind: of the norm behind the block; without such a norm, any tensor.
    """

    residual: torch.Tensor
    stride: int
    weight: torch.Tensor
    behind: torch.Tensor
    h: torch.Tensor


class FinishRule(NamedTuple):
    """What a kernel is compiled for. n: values of a row, block: the next power of two.

    norm, behind: of FORMULAS, with eps as fp64 bits. dtype: of y; inner: of the rows that `behind`
    makes.
    """

    n: int
    block: int
    norm: int
    eps: int
    behind: int
    behind_eps: int
    dtype: tl.dtype
    inner: tl.dtype


@triton.jit
def finish_factors(stream, columns, RULE: tl.constexpr):
    """Factor and bias of the norm, then those of the norm behind: what `finished_rows` takes."""
    factors = load_factors(stream.weight, columns, RULE.n, RULE.norm)
    return factors + load_factors(stream.behind, columns, RULE.n, RULE.behind)


@triton.jit
def added_rows(total, at, residual, scale, shift, h, present, RULE: tl.constexpr):
    """Store h of rows total [R, BLOCK], zero past N, at `at`, and return it.

    residual: of these rows, loaded; scale, shift: of the norm behind; present: what exists of them.
    """
    if RULE.behind != NO_NORM:
        # + 0 turns a sum of -0 into +0, so that no y of the norm behind is -0 by it.
        total = normed_rows(
            total + 0.0, scale, shift, present, RULE.n, RULE.behind_eps, RULE.behind
        )
        total = total.to(RULE.inner).to(tl.float32)
    value = total + residual
    tl.store(h + at, value, mask=present)
    return value


@triton.jit
def following_rows(value, scale, shift, present, RULE: tl.constexpr):
    """y of rows of h; scale, shift: of the norm that follows."""
    if RULE.norm != NO_NORM:
        value = normed_rows(value, scale, shift, present, RULE.n, RULE.eps, RULE.norm)
    return value.to(RULE.dtype)


@triton.jit
def finished_rows(total, at, residual, factors, h, present, RULE: tl.constexpr):
    """Store h, return y; factors: of `finish_factors`, loaded once for many rows."""
    value = added_rows(total, at, residual, factors[2], factors[3], h, present, RULE)
    return following_rows(value, factors[0], factors[1], present, RULE)


@triton.jit(do_not_specialize=["m"])
def finish_sums(
    sums,
    stream,
    y,
    m,
    RULE: tl.constexpr,
    PROGRAM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """sums [C, m, N] -> h, y; ROWS rows a program."""
    # 1. Wait for earlier kernels; choose this program's rows.
    await_earlier(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, RULE.block)
    here = (rows < m)[:, None] & (columns < RULE.n)[None, :]
    at = rows[:, None] * RULE.n + columns[None, :]
    # 2. Fold the sums.
    total = folded_operands(sums, m * RULE.n, at, here, PROGRAM)
    # 3. Add the stream, norm, store.
    source = stream.residual + rows[:, None] * stream.stride + columns[None, :]
    residual = tl.load(source, mask=here, other=0.0).to(tl.float32)
    scale, shift = load_factors(stream.behind, columns, RULE.n, RULE.behind)
    value = added_rows(total, at, residual, scale[None, :], shift[None, :], stream.h, here, RULE)
    scale, shift = load_factors(stream.weight, columns, RULE.n, RULE.norm)
    normed = following_rows(value, scale[None, :], shift[None, :], here, RULE)
    tl.store(y + at, normed, mask=here)


def stream_rows(finish: Finish, h: torch.Tensor) -> StreamRows:
    """The run-time argument of a finish that writes h; a row of the residual lies together."""
    residual, norm, behind = finish
    weight = h if norm is None else norm.weight
    return StreamRows(
        residual, residual.stride(0), weight, weight if behind is None else behind.weight, h
    )


def finish_rule(finish: Finish, n: int) -> FinishRule:
    """The compile-time argument for rows of n values."""
    _, norm, behind = finish
    return _rule(
        n,
        *(("", 0.0) if norm is None else (norm.formula, norm.eps)),
        *(("", 0.0) if behind is None else (behind.formula, behind.eps)),
        finish.dtype,
        finish.dtype if behind is None else behind.dtype,
    )


@cache
def _rule(
    n: int,
    norm: str,
    eps: float,
    behind: str,
    behind_eps: float,
    dtype: torch.dtype,
    inner: torch.dtype,
) -> FinishRule:
    return FinishRule(
        n,
        next_power_of_2(n),
        FORMULAS[norm],
        eps_bits(eps),
        FORMULAS[behind],
        eps_bits(behind_eps),
        kernel_dtype(dtype),
        kernel_dtype(inner),
    )


def kernel_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype of torch."""
    name: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return name


def fold_and_norm(
    sums: PartialSums, finish: Finish, warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y) of sums [C, M, N] with one root, in one kernel; `warps` overrides the static choice.

    Raises ValueError for sums of several roots, and for rows that are too wide.
    """
    residual = finish.residual
    m, n = residual.shape
    h = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
    y = torch.empty(h.shape, dtype=finish.dtype, device=h.device)
    check_width(n)
    if len(sums.roots) != 1:
        raise ValueError(f"{len(sums.roots)} roots: fold them into one total first")
    if h.numel() == 0:
        return h, y
    if residual.stride(1) != 1:
        finish = finish._replace(residual=residual.contiguous())
    rule = finish_rule(finish, n)
    rows = max(1, min(512 // rule.block, 8))
    finish_sums[(cdiv(m, rows),)](
        sums.values.contiguous(),
        stream_rows(finish, h),
        y,
        m,
        RULE=rule,
        PROGRAM=own_program(sums.roots),
        ROWS=rows,
        num_warps=warps or _fold_warps(m, n, sums.values.shape[0], hardware.gpu_of(h.device)),
        enable_fp_fusion=False,
        **dependent_launch(h.device),
    )
    return h, y


def _fold_warps(m: int, n: int, count: int, gpu: Gpu) -> int:
    """Few rows leave processors idle: 8 values a thread, 16 where `count` sums fly beside them."""
    if m > gpu.multiprocessors:
        return norm_warps(n)
    return max(4, min(next_power_of_2(n) // (256 if count <= 2 else 512), 16))
