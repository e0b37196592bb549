"""Root-mean-square norm with an order-free sum (Zhang and Sennrich 2019, arXiv 1910.07467).

    y = round((x * r) * w),   r = fp32(1 / sqrt(sum / n + eps))

The sum of squares is int64 fixed point: rint(x^2 * 2^(40 - 2e)), e the exponent of the row's
largest |x|, so no layout can change it; square root, division and `+ eps` are fp64 and
IEEE-rounded. Finite rows have the bits of `kernels/cpu/pointwise/norm.py`; a row with NaN or
infinity gives NaN. One program a row (or a few), N up to 65,536.

The formulas by a norm's kind are `load_factors` and `normed_rows`; `finish.py` applies them to the
residual stream. Shapes: M rows, N values of a row, x and y [M, N], weight [N].
"""

import struct

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.order import MASS_BITS

_MASS_BITS = tl.constexpr(MASS_BITS)
ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds to an integer, ties even
ROUNDER_BITS = tl.constexpr(0x4338000000000000)
_INFINITY = tl.constexpr(0x7F800000)
_WIDEST = 1 << 16
FORMULAS = {"": 0, "rms": 1, "layer": 2}
"""What kernels are compiled for, by a norm's formula; "": none. Triton 3.6 passes no strings."""
NO_NORM = tl.constexpr(FORMULAS[""])
_LAYER = tl.constexpr(FORMULAS["layer"])


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp64, exactly, for int64 exponents of normal numbers."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def nearest_integer(x):
    """fp64 below 2^51 to int64, ties to even: it stands in the low bits of ROUNDER plus it."""
    return (x + ROUNDER).to(tl.int64, bitcast=True) - ROUNDER_BITS


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
    return tl.sum(nearest_integer(scaled), axis=1)


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
    total = tl.sum(nearest_integer(scaled), axis=1)
    whole = total.to(tl.float64) * power_of_two(exponent - _MASS_BITS)
    return (whole / tl.full(whole.shape, N, tl.float64)).to(tl.float32)


@triton.jit
def load_factors(weight, columns, N: tl.constexpr, FORMULA: tl.constexpr):
    """A norm's factor and, of a layer norm, its bias, else the factor again; of none, neither."""
    present = columns < N
    scale = present
    if FORMULA != NO_NORM:
        scale = tl.load(weight + columns, mask=present, other=0.0)
    shift = scale
    if FORMULA == _LAYER:
        shift = tl.load(weight + N + columns, mask=present, other=0.0)
    return scale, shift


@triton.jit
def normed_rows(
    x, scale, shift, present, N: tl.constexpr, EPS_BITS: tl.constexpr, FORMULA: tl.constexpr
):
    """fp32 rows x [R, BLOCK], zero past N -> their norm before its rounding; see `Norm`.

    scale, shift [1, BLOCK]: of `load_factors`.
    """
    if FORMULA == _LAYER:
        x = tl.where(present, x - row_mean(x, N)[:, None], 0.0)
    root = reciprocal_root(x, N, EPS_BITS)
    y = (x * root[:, None]) * scale.to(tl.float32)
    if FORMULA == _LAYER:
        y = y + shift.to(tl.float32)
    return y


@triton.jit(do_not_specialize=["m"])
def norm_rows(
    x,
    weight,
    y,
    m,
    stride,
    N: tl.constexpr,
    EPS_BITS: tl.constexpr,
    FORMULA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [m, N], its rows `stride` values apart -> y, their norm; ROWS rows a program."""
    await_earlier(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    here = (rows < m)[:, None] & (columns < N)[None, :]
    source = x + rows[:, None] * stride + columns[None, :]
    value = tl.load(source, mask=here, other=0.0).to(tl.float32)
    scale, shift = load_factors(weight, columns, N, FORMULA)
    normed = normed_rows(value, scale[None, :], shift[None, :], here, N, EPS_BITS, FORMULA)
    target = y + rows[:, None] * N + columns[None, :]
    tl.store(target, normed.to(y.dtype.element_ty), mask=here)


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
    m, n = rows.shape
    check_width(n)
    if x.numel() == 0:
        return y.view(x.shape)
    block = next_power_of_2(n)
    height = max(1, min(512 // block, 8))
    norm_rows[(cdiv(m, height),)](
        rows,
        norm.weight,
        y,
        m,
        rows.stride(0),
        N=n,
        EPS_BITS=eps_bits(norm.eps),
        FORMULA=FORMULAS[norm.formula],
        ROWS=height,
        BLOCK=block,
        num_warps=norm_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
    return y.view(x.shape)


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
    check_width(n)
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
        num_warps=norm_warps(n),
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def eps_bits(eps: float) -> int:
    """eps as the bits of an fp64: a Triton float argument would be rounded to fp32."""
    return int(struct.unpack("<q", struct.pack("<d", eps))[0])


def norm_warps(n: int) -> int:
    """Warps for a row of n values."""
    return 4 if n <= 2048 else 8 if n <= 8192 else 16


def check_width(n: int) -> None:
    """Raise ValueError for rows of more values than a program takes."""
    if n > _WIDEST:
        raise ValueError(f"a row of {n} values: the norm on the GPU takes at most {_WIDEST}")
