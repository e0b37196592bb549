"""Root-mean-square norm with an order-free sum (Zhang and Sennrich 2019, arXiv 1910.07467).

    h = (total + bias) + residual, each addition rounded to fp32
    y = round((h * r) * w),   r = fp32(1 / sqrt(sum / n + eps))

The sum of squares is int64 fixed point: rint(x^2 * 2^(40 - 2e)), e the exponent of the row's
largest |x|, so no layout can change it; square root, division and `+ eps` are fp64 and
IEEE-rounded. Finite rows have the bits of `kernels/cpu/pointwise/norm.py`; a row with NaN or
infinity gives NaN. One program a row (or a few), N up to 65,536.

Shapes: M rows, N values of a row, C fp32 sums that are folded.

    x, residual, h, y [M, N]    weight, bias [N]    sums [C, M, N] fp32
"""

import struct

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.fold import folded_operands
from tpdet.kernels.fold_program import NO_FOLD, own_program
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import MASS_BITS
from tpdet.kernels.partial_sums import PartialSums

_MASS_BITS = tl.constexpr(MASS_BITS)
_ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds to an integer, ties even
_INFINITY = tl.constexpr(0x7F800000)
_WIDEST = 1 << 16
_FEW_ROWS = H200.multiprocessors  # up to about a program a multiprocessor


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp64, exactly, for int64 exponents of normal numbers."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def row_exponent(largest):
    """The exponents of rows whose largest |x| has these fp32 bits, and which rows are finite."""
    finite = largest < _INFINITY
    wide_largest = tl.where(finite, largest, 0).to(tl.float32, bitcast=True).to(tl.float64)
    exponent = (wide_largest.to(tl.int64, bitcast=True) >> 52) - 1023
    return tl.where(wide_largest == 0.0, 0, exponent), finite


@triton.jit
def square_mass(x, exponent, finite):
    """The sum of squares [R] int64 in fixed point, which no order of additions changes."""
    wide = tl.where(finite[:, None], x, 0.0).to(tl.float64)
    scaled = (wide * wide) * power_of_two(exponent * -2 + _MASS_BITS)[:, None]
    whole = ((scaled + _ROUNDER) - _ROUNDER).to(tl.int64)
    return tl.sum(whole, axis=1)


@triton.jit
def root_of_mass(total, exponent, finite, N: tl.constexpr, EPS_BITS: tl.constexpr):
    """One over the root [R], in fp64, rounded once to fp32."""
    mass = total.to(tl.float64) * power_of_two(exponent * 2 - _MASS_BITS)
    count = tl.full(mass.shape, N, tl.float64)
    eps = tl.full(mass.shape, EPS_BITS, tl.int64).to(tl.float64, bitcast=True)
    one = tl.full(mass.shape, 1, tl.float64)
    root = (one / tl.sqrt(mass / count + eps)).to(tl.float32)
    return tl.where(finite, root, float("nan"))


@triton.jit
def reciprocal_root(x, N: tl.constexpr, EPS_BITS: tl.constexpr):
    """r [R] in fp32 for rows x [R, BLOCK] in fp32, zero past N; EPS_BITS: eps as fp64 bits."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent, finite = row_exponent(largest)
    return root_of_mass(square_mass(x, exponent, finite), exponent, finite, N, EPS_BITS)


@triton.jit
def row_mean(x, N: tl.constexpr):
    """The mean [R] in fp32 of rows x [R, BLOCK] in fp32, zero past N; 0 of rows not finite."""
    exponent, finite = row_exponent(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    wide = tl.where(finite[:, None], x, 0.0).to(tl.float64)
    scaled = wide * power_of_two(exponent * -1 + _MASS_BITS)[:, None]
    total = tl.sum(((scaled + _ROUNDER) - _ROUNDER).to(tl.int64), axis=1)
    whole = total.to(tl.float64) * power_of_two(exponent - _MASS_BITS)
    return (whole / tl.full(whole.shape, N, tl.float64)).to(tl.float32)


@triton.jit
def normed_rows(
    x, scale, shift, present, N: tl.constexpr, EPS_BITS: tl.constexpr, LAYER: tl.constexpr
):
    """fp32 rows x [R, BLOCK], zero past N -> their norm before its rounding; see `Norm`.

    scale, shift [1, BLOCK]: the factor and, of a layer norm, the bias.
    """
    if LAYER:
        x = tl.where(present, x - row_mean(x, N)[:, None], 0.0)
    root = reciprocal_root(x, N, EPS_BITS)
    y = (x * root[:, None]) * scale.to(tl.float32)
    if LAYER:
        y = y + shift.to(tl.float32)
    return y


@triton.jit(do_not_specialize=["m"])
def norm_rows(
    x,
    weight,
    y,
    sums,
    bias,
    residual,
    m,
    stride,
    N: tl.constexpr,
    EPS_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """With a PROGRAM, h of the fold of `sums`, `bias`, `residual` goes to x first. NORM: y of x."""
    # 1. Wait for earlier kernels; choose this program's rows.
    await_earlier(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    present = columns < N
    here = (rows < m)[:, None] & present[None, :]
    at = rows[:, None] * N + columns[None, :]
    # 2. Fold the sums and add bias and residual, or load rows that are whole.
    if len(PROGRAM.planes) > 0:
        value = folded_operands(sums, m * N, at, here, PROGRAM)
        if HAS_BIAS:
            shift = tl.load(bias + columns, mask=present, other=0.0).to(tl.float32)
            value = value + shift[None, :]
        from_residual = tl.load(
            residual + rows[:, None] * stride + columns[None, :], mask=here, other=0.0
        )
        value = value + from_residual.to(tl.float32)
        tl.store(x + at, value, mask=here)
    else:
        value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=here, other=0.0)
    # 3. Norm the rows.
    if NORM:
        wide = value.to(tl.float32)
        scale = tl.load(weight + columns, mask=present, other=0.0).to(tl.float32)
        shift = scale
        if LAYER:
            shift = tl.load(weight + N + columns, mask=present, other=0.0).to(tl.float32)
        normed = normed_rows(
            wide, scale[None, :], shift[None, :], present[None, :], N, EPS_BITS, LAYER
        )
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=here)


@triton.jit
def part_of_rows(
    x,
    weight,
    y,
    largest,
    mass,
    stride,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    EPS_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Parts x [M, N] of rows of COUNT values; a program a row. By STAGE:

    0: largest[row] = max |x|; 1: mass[row] by largest; 2: y, the norm by largest and mass.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    here = columns < N
    value = tl.load(x + row * stride + columns, mask=here, other=0.0).to(tl.float32)
    rows = row + tl.zeros([1], tl.int64)
    if STAGE == 0:
        bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.store(largest + rows, bits.to(tl.float32, bitcast=True))
    else:
        bits = tl.load(largest + rows).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        exponent, finite = row_exponent(bits)
        if STAGE == 1:
            tl.store(mass + rows, square_mass(value, exponent, finite))
        else:
            root = root_of_mass(tl.load(mass + rows), exponent, finite, COUNT, EPS_BITS)
            scale = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
            normed = (value * root[:, None]) * scale
            tl.store(y + row * N + columns, normed.to(y.dtype.element_ty), mask=here)


def row_largest(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> the largest |x| of each row [M] fp32; NaN where there is one; 0 of no values."""
    largest = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    _launch_part(0, x, largest)
    return largest


def row_mass(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> the integer sum of its squares [M] int64, by the exponent of `largest` [M]."""
    mass = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    _launch_part(1, x, largest, mass)
    return mass


def norm_by_mass(
    x: torch.Tensor, largest: torch.Tensor, mass: torch.Tensor, count: int, norm: Norm
) -> torch.Tensor:
    """x [M, N], part of rows of `count` values with that largest |x| and mass -> their norm."""
    y = torch.empty(x.shape, dtype=norm.dtype, device=x.device)
    _launch_part(2, x, largest, mass, y, count, norm)
    return y


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [..., N] in any float dtype, norm [N] -> [..., N] in the norm's dtype, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(rows.shape, dtype=norm.dtype, device=x.device)
    _launch(rows, norm, y, None, None, rows, _warps(rows.shape[1]))
    return y.view(x.shape)


def add_residual(
    total: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """h = (total + bias) + residual [M, N] in fp32: total folded, fp32 or one rounded product."""
    h = torch.empty(total.shape, dtype=torch.float32, device=total.device)
    sums = PartialSums(total.unsqueeze(0), (0,))
    _launch(h, None, None, sums, bias, residual, _warps(total.shape[1]))
    return h


def add_residual_and_norm(
    total: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y): `add_residual`, then `rms_norm` of h, in one pass; the same bits."""
    return fold_and_norm(PartialSums(total.unsqueeze(0), (0,)), bias, residual, norm)


def fold_and_norm(
    sums: PartialSums,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y) of sums [C, M, N] with one root: `add_residual` of the fold, then `rms_norm` of h.

    One kernel; `warps` a program overrides the static choice.
    """
    h = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
    y = torch.empty(h.shape, dtype=norm.dtype, device=h.device)
    if warps is None:
        warps = _fold_warps(h.shape[0], h.shape[1], sums.values.shape[0])
    _launch(h, norm, y, sums, bias, residual, warps)
    return h, y


def _launch_part(
    stage: int,
    x: torch.Tensor,
    largest: torch.Tensor,
    mass: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    count: int = 1,
    norm: Norm | None = None,
) -> None:
    """A stage of part_of_rows over x [M, N], whose rows may lie apart."""
    m, n = x.shape
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: the norm on the GPU takes at most {_WIDEST}")
    if x.numel() == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    part_of_rows[(m,)](
        x,
        x if norm is None else norm.weight,
        x if y is None else y,
        largest.contiguous(),
        largest if mass is None else mass.contiguous(),
        x.stride(0),
        N=n,
        COUNT=count,
        EPS_BITS=eps_bits(0.0 if norm is None else norm.eps),
        BLOCK=next_power_of_2(n),
        STAGE=stage,
        num_warps=_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def eps_bits(eps: float) -> int:
    """eps as the bits of an fp64: a Triton float argument would be rounded to fp32."""
    return int(struct.unpack("<q", struct.pack("<d", eps))[0])


def _warps(n: int) -> int:
    """Warps for a row of n values."""
    return 4 if n <= 2048 else 8 if n <= 8192 else 16


def _fold_warps(m: int, n: int, count: int) -> int:
    """Few rows leave processors idle: 8 values a thread, 16 where `count` sums fly beside them."""
    if m > _FEW_ROWS:
        return _warps(n)
    return max(4, min(next_power_of_2(n) // (256 if count <= 2 else 512), 16))


def _launch(
    x: torch.Tensor,
    norm: Norm | None,
    y: torch.Tensor | None,
    sums: PartialSums | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    warps: int,
) -> None:
    """norm_rows over x [M, N]; the rows of `residual` (x itself without sums) may be apart."""
    m, n = x.shape
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: the norm on the GPU takes at most {_WIDEST}")
    if x.numel() == 0:
        return
    if sums is not None and len(sums.roots) != 1:
        raise ValueError(f"{len(sums.roots)} roots: fold them into one total first")
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    block = next_power_of_2(n)
    rows = max(1, min(512 // block, 8))
    norm_rows[(cdiv(m, rows),)](
        x,
        x if norm is None else norm.weight,
        x if y is None else y,
        x if sums is None else sums.values.contiguous(),
        x if bias is None else bias,
        residual,
        m,
        residual.stride(0),
        N=n,
        EPS_BITS=eps_bits(0.0 if norm is None else norm.eps),
        ROWS=rows,
        BLOCK=block,
        PROGRAM=own_program(sums.roots) if sums else NO_FOLD,
        HAS_BIAS=bias is not None,
        NORM=y is not None,
        LAYER=norm is not None and norm.layer,
        num_warps=warps,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
