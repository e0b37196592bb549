"""Factors of rows of the gated delta rule: the CPU's bits (`kernels/exact/decays.py`).

    n = 1 / sqrt(sum k^2 + 1e-6),  m = (the same of q) * Dk^-0.5,  c = sigmoid(b) * n,  l by a

One program takes ROWS rows of one key head and of its GROUP value heads.

Shapes: M rows; q, k [M, Hk, D]; a, b [M, Hv]; n, m [M, Hk], c [M, Hv] fp32; l [M, Hv] int64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.norm import (
    ROUNDER,
    ROUNDER_BITS,
    eps_bits,
    nearest_integer,
    root_of_mass,
    row_exponent,
    square_mass,
)
from tpdet.kernels.exact import decays
from tpdet.kernels.inputs.linear_state import LENGTH_EPS, DeltaGates

LOWEST = tl.constexpr(decays.LOWEST)
STRONGEST = tl.constexpr(decays.STRONGEST)
TURNS = tl.constexpr(decays.TURNS)
LOG2_HIGH, LOG2_LOW = (tl.constexpr(part) for part in decays.LOG2_PARTS)
EXP_TERMS = tl.constexpr(decays.EXP_TERMS)
ATANH_TERMS = tl.constexpr(decays.ATANH_TERMS)
EXP_COUNT = tl.constexpr(len(decays.EXP_TERMS))
ATANH_COUNT = tl.constexpr(len(decays.ATANH_TERMS))
DECAY_UNIT = tl.constexpr(2.0**-decays.DECAY_BITS)
DECAY_STEPS = tl.constexpr(2.0**decays.DECAY_BITS)
LOWEST_STEPS = tl.constexpr(int(decays.LOWEST) << decays.DECAY_BITS)
_FEWEST = tl.constexpr(-1020)  # turns: below those of LOWEST, so that 2^turns is normal
LENGTH_EPS_BITS = tl.constexpr(eps_bits(LENGTH_EPS))
_ROWS = 16
WARPS = 2


class DeltaStep(NamedTuple):
    """Rows of a step: q, k [M, Hk, D], v [M, Hv, Dv], a, b [M, Hv], so many values apart."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    q_stride: int
    k_stride: int
    v_stride: int
    a_stride: int
    b_stride: int


class RowFactors(NamedTuple):
    """n and m [M, Hk], c [M, Hv] in fp32, l [M, Hv] int64."""

    key: torch.Tensor
    query: torch.Tensor
    strength: torch.Tensor
    decay: torch.Tensor


@triton.jit
def horner(x, TERMS: tl.constexpr, COUNT: tl.constexpr):
    """A polynomial in fp64, without fma; its terms from the highest power on."""
    total = tl.full(x.shape, TERMS[0], tl.float64)
    for i in tl.static_range(1, COUNT):
        total = total * x + TERMS[i]
    return total


@triton.jit
def exponential(x):
    """exp of fp64 x <= 700; NaN stays NaN."""
    x = tl.where(x < LOWEST, LOWEST, x)
    turns = tl.floor(x * TURNS + 0.5)
    rest = (x - turns * LOG2_HIGH) - turns * LOG2_LOW
    whole = tl.where(turns == turns, turns, 0.0).to(tl.int64)
    return horner(rest, EXP_TERMS, EXP_COUNT) * ((whole + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def decay_of(total):
    """Sums of l, int64 <= 0 -> factors in fp32: `exponential`, whose conversions are slow.

    An integer below 2^51 stands in the low bits of ROUNDER plus it.
    """
    total = tl.maximum(total, LOWEST_STEPS)
    x = ((total + ROUNDER_BITS).to(tl.float64, bitcast=True) - ROUNDER) * DECAY_UNIT
    return decay_of_log(x)


@triton.jit
def decay_of_log(x):
    """fp32 of `exponential` of fp64 x, with its bits; of x > 0 nothing is said."""
    shifted = x * TURNS + 0.5
    rounded = shifted + ROUNDER
    nearest = rounded - ROUNDER
    above = nearest > shifted
    turns = tl.where(above, nearest - 1.0, nearest)  # the floor of shifted
    rest = (x - turns * LOG2_HIGH) - turns * LOG2_LOW
    whole = rounded.to(tl.int64, bitcast=True).to(tl.int32) - above.to(tl.int32)
    whole = tl.maximum(whole, _FEWEST) + 1023
    power = (whole.to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (horner(rest, EXP_TERMS, EXP_COUNT) * power).to(tl.float32)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in fp32, from fp64."""
    wide = x.to(tl.float64)
    small = exponential(-tl.abs(wide))
    one = tl.full(small.shape, 1.0, tl.float64)
    return (tl.where(wide < 0.0, small, one) / (small + 1.0)).to(tl.float32)


@triton.jit
def log_decay(a, a_log, dt_bias):
    """l as int64; -128 where a is NaN."""
    x = a.to(tl.float64) + dt_bias.to(tl.float64)
    small = exponential(-tl.abs(x))
    ratio = small / (small + 2.0)
    tail = (ratio + ratio) * horner(ratio * ratio, ATANH_TERMS, ATANH_COUNT)
    softplus = tl.where(x > 0.0, x, 0.0) + tail
    decay = -(exponential(a_log.to(tl.float64)) * softplus)
    decay = tl.where(decay > STRONGEST, decay, STRONGEST)
    return nearest_integer(decay * DECAY_STEPS)


@triton.jit
def reciprocal_length(x):
    """1 / sqrt(sum + 1e-6) in fp32 of rows x [R, D]; the sums are dealt out to a warp's lanes.

    Where a sum was made, all lanes that added to it have it: each would make its root.
    """
    x = x.to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent, finite = row_exponent(largest)
    row = tl.arange(0, x.shape[0])
    mass = tl.gather(square_mass(x, exponent, finite), row, 0)
    exponent, finite = row_exponent(tl.gather(largest, row, 0))
    return root_of_mass(mass, exponent, finite, 1, LENGTH_EPS_BITS)


@triton.jit(do_not_specialize=["m"])
def row_factors(
    step,
    gates,
    factors,
    m,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: ROWS rows x key heads with their GROUP value heads, PAD of them, a power of two."""
    await_earlier(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    lane = tl.arange(0, LANES)
    live = rows < m
    inside = live[:, None] & (lane < SIZE)[None, :]
    column = head * SIZE + lane[None, :]
    q = tl.load(step.q + rows[:, None] * step.q_stride + column, mask=inside, other=0.0)
    k = tl.load(step.k + rows[:, None] * step.k_stride + column, mask=inside, other=0.0)
    of_key, of_query = reciprocal_length(k), reciprocal_length(q) * scale
    tl.store(factors.key + rows * KEY_HEADS + head, of_key, mask=live)
    tl.store(factors.query + rows * KEY_HEADS + head, of_query, mask=live)
    member = tl.arange(0, PAD)[None, :]
    value_head = head * GROUP + member
    there = live[:, None] & (member < GROUP)
    spot = rows[:, None] * (KEY_HEADS * GROUP) + value_head
    a = tl.load(step.a + rows[:, None] * step.a_stride + value_head, mask=there, other=0.0)
    b = tl.load(step.b + rows[:, None] * step.b_stride + value_head, mask=there, other=0.0)
    a_log = tl.load(gates.a_log + value_head, mask=member < GROUP, other=0.0)
    dt_bias = tl.load(gates.dt_bias + value_head, mask=member < GROUP, other=0.0)
    tl.store(factors.decay + spot, log_decay(a, a_log, dt_bias), mask=there)
    tl.store(factors.strength + spot, sigmoid(b) * of_key[:, None], mask=there)


def factors_of(step: DeltaStep, gates: DeltaGates) -> RowFactors:
    """The factors of all rows of a step."""
    m, key_heads, size = step.k.shape
    heads, device = step.v.shape[1], step.k.device
    factors = RowFactors(
        torch.empty(m, key_heads, dtype=torch.float32, device=device),
        torch.empty(m, key_heads, dtype=torch.float32, device=device),
        torch.empty(m, heads, dtype=torch.float32, device=device),
        torch.empty(m, heads, dtype=torch.int64, device=device),
    )
    row_factors[(cdiv(m, _ROWS), key_heads)](
        step,
        gates,
        factors,
        m,
        size**-0.5,
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        PAD=next_power_of_2(heads // key_heads),
        SIZE=size,
        LANES=next_power_of_2(size),
        ROWS=_ROWS,
        num_warps=WARPS,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    return factors
