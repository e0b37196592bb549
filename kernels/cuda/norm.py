"""Root-mean-square norm with an order-free sum (Zhang and Sennrich 2019, arXiv 1910.07467).

    h = round((total + bias) + residual)
    y = round((x * r) * w),   r = fp32(1 / sqrt(sum / n + eps))

The sum of squares is int64 fixed point: rint(x^2 * 2^(40 - 2e)), e the exponent of the row's
largest |x|, so no layout can change it; square root, division and `+ eps` are fp64 and
IEEE-rounded. Finite rows have the bits of `kernels/cpu/norm.py`; a row with NaN or infinity gives
NaN. One program a row (or a few), N up to 65,536.
"""

import struct

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.fold import fold_roots
from tpdet.kernels.order import MASS_BITS
from tpdet.kernels.partial_sums import PartialSums

_MASS_BITS = tl.constexpr(MASS_BITS)
_ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds to an integer, ties even
_INFINITY = tl.constexpr(0x7F800000)
_WIDEST = 1 << 16


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp64, exactly, for int64 exponents of normal numbers."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def reciprocal_root(x, N: tl.constexpr, EPS_BITS: tl.constexpr):
    """r [R] in fp32 for rows x [R, BLOCK] in fp32, zero past N; EPS_BITS: eps as fp64 bits."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < _INFINITY
    wide_largest = tl.where(finite, largest, 0).to(tl.float32, bitcast=True).to(tl.float64)
    exponent = (wide_largest.to(tl.int64, bitcast=True) >> 52) - 1023
    exponent = tl.where(wide_largest == 0.0, 0, exponent)
    wide = tl.where(finite[:, None], x, 0.0).to(tl.float64)
    scaled = (wide * wide) * power_of_two(exponent * -2 + _MASS_BITS)[:, None]
    whole = ((scaled + _ROUNDER) - _ROUNDER).to(tl.int64)
    mass = tl.sum(whole, axis=1).to(tl.float64) * power_of_two(exponent * 2 - _MASS_BITS)
    count = tl.full(mass.shape, N, tl.float64)
    eps = tl.full(mass.shape, EPS_BITS, tl.int64).to(tl.float64, bitcast=True)
    one = tl.full(mass.shape, 1, tl.float64)
    root = (one / tl.sqrt(mass / count + eps)).to(tl.float32)
    return tl.where(finite, root, float("nan"))


@triton.jit(do_not_specialize=["m"])
def norm_rows(
    x, weight, y, total, bias, residual, m, stride,
    N: tl.constexpr, EPS_BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """ADD: h of `total`, `bias`, `residual` is stored to x first. NORM: y of x."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    present = columns < N
    here = (rows < m)[:, None] & present[None, :]
    at = rows[:, None] * N + columns[None, :]
    if ADD:
        value = tl.load(total + at, mask=here, other=0.0)
        if HAS_BIAS:
            shift = tl.load(bias + columns, mask=present, other=0.0).to(tl.float32)
            value = value + shift[None, :]
        from_residual = tl.load(
            residual + rows[:, None] * stride + columns[None, :], mask=here, other=0.0
        )
        value = (value + from_residual.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, value, mask=here)
    else:
        value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=here, other=0.0)
    if NORM:
        wide = value.to(tl.float32)
        scale = tl.load(weight + columns, mask=present, other=0.0).to(tl.float32)
        root = reciprocal_root(wide, N, EPS_BITS)
        tl.store(
            y + at, ((wide * root[:, None]) * scale[None, :]).to(y.dtype.element_ty), mask=here
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N] in any float dtype, weight [N] -> [..., N] in x's dtype, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, weight, y, None, None, None, rows.stride(0), eps)
    return y.view(x.shape)


def add_residual(
    total: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """h = round((total + bias) + residual): total [M, N] fp32 folded; in residual's dtype."""
    h = torch.empty(total.shape, dtype=residual.dtype, device=total.device)
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    _launch(h, None, None, total.contiguous(), bias, residual, residual.stride(0), 0.0)
    return h


def add_residual_and_norm(
    total: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y): `add_residual`, then `rms_norm` of h, in one pass; the same bits."""
    h = torch.empty(total.shape, dtype=residual.dtype, device=total.device)
    y = torch.empty_like(h)
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    _launch(h, weight, y, total.contiguous(), bias, residual, residual.stride(0), eps)
    return h, y


def fold_and_norm(
    sums: PartialSums,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y) of sums [C, M, N] with one root: the fold, then `add_residual_and_norm`."""
    total = sums.values[0] if sums.is_total else fold_roots(sums.values, 0, sums.roots, 1)[0]
    return add_residual_and_norm(total, bias, residual, weight, eps)


def eps_bits(eps: float) -> int:
    """eps as the bits of an fp64: a Triton float argument would be rounded to fp32."""
    return int(struct.unpack("<q", struct.pack("<d", eps))[0])


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor | None,
    total: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    eps: float,
) -> None:
    m, n = x.shape
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: the norm on the GPU takes at most {_WIDEST}")
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(n)
    rows = max(1, min(512 // block, 8))
    unused = x
    norm_rows[(triton.cdiv(m, rows),)](
        x,
        unused if weight is None else weight,
        unused if y is None else y,
        unused if total is None else total,
        unused if bias is None else bias,
        unused if residual is None else residual,
        m, stride,
        N=n, EPS_BITS=eps_bits(eps), ROWS=rows, BLOCK=block,
        ADD=total is not None, HAS_BIAS=bias is not None, NORM=y is not None,
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16, enable_fp_fusion=False,
    )  # fmt: skip
