"""Rotary embedding frequencies, computed exactly and rounded once to fp32. Needs no torch.

Sources: RoPE, Su et al. 2021 (arXiv 2104.09864); linear position interpolation, Chen et al. 2023
(arXiv 2306.15595); YaRN, Peng et al. 2023 (arXiv 2309.00071); the llama3 scaling as released with
Llama 3.1; LongRoPE, Ding et al. 2024 (arXiv 2402.13753). Every intermediate is a 50-digit decimal,
so the rounding to fp32 is the only one.
"""

import struct
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

MAX_POSITION = 1 << 22
"""Where every table ends: below it the reduction of angles is exact."""

_CONTEXT = Context(prec=50, rounding=ROUND_HALF_EVEN)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


@dataclass(frozen=True)
class RotarySpec:
    """What fixes a rotary table: the kind of scaling and its numbers, never the context length.

    kind: "default", "linear", "llama3", "yarn" or "longrope". `dim` is the head's rotated width
    (even). `attention_factor` multiplies cos and sin (longrope; yarn, where None derives it from
    `factor`, `mscale` and `mscale_all_dim` as the paper and Hugging Face do). frequency_factors: of
    longrope, a divisor of each of the `dim / 2` frequencies.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@cache
def inverse_frequencies(spec: RotarySpec) -> tuple[float, ...]:
    """The `dim / 2` inverse frequencies, each the fp32 nearest to its exact value.

    Raises ValueError for an unknown kind.
    """
    with localcontext(_CONTEXT):
        theta, dim = Decimal(spec.theta), spec.dim
        plain = [1 / theta ** (Decimal(2 * i) / dim) for i in range(dim // 2)]
        if spec.kind == "default":
            exact = plain
        elif spec.kind == "linear":
            exact = [f / Decimal(spec.factor) for f in plain]
        elif spec.kind == "llama3":
            exact = [_llama3(f, spec) for f in plain]
        elif spec.kind == "yarn":
            exact = _yarn(plain, spec)
        elif spec.kind == "longrope":
            pairs = zip(plain, spec.frequency_factors, strict=True)
            exact = [f / Decimal(divisor) for f, divisor in pairs]
        else:
            kinds = "default, linear, llama3, yarn or longrope"
            raise ValueError(f"rotary scaling {spec.kind!r}: use {kinds}")
        return tuple(_to_fp32(f) for f in exact)


def attention_scaling(spec: RotarySpec) -> float:
    """The fp32 factor on cos and sin: 1.0 unless yarn or longrope."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return _to_fp32(Decimal(spec.attention_factor))
    with localcontext(_CONTEXT):
        if spec.mscale and spec.mscale_all_dim:
            ratio = _magnitude(spec.factor, spec.mscale) / _magnitude(
                spec.factor, spec.mscale_all_dim
            )
            return _to_fp32(ratio)
        return _to_fp32(_magnitude(spec.factor, 1.0))


def _magnitude(factor: float, mscale: float) -> Decimal:
    if factor <= 1:
        return Decimal(1)
    return Decimal("0.1") * Decimal(mscale) * Decimal(factor).ln() + 1


def _llama3(frequency: Decimal, spec: RotarySpec) -> Decimal:
    factor, old = Decimal(spec.factor), Decimal(spec.original_max_position)
    low, high = Decimal(spec.low_freq_factor), Decimal(spec.high_freq_factor)
    wavelength = 2 * _PI / frequency
    if wavelength < old / high:
        return frequency
    if wavelength > old / low:
        return frequency / factor
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(plain: list[Decimal], spec: RotarySpec) -> list[Decimal]:
    theta, dim, factor = Decimal(spec.theta), spec.dim, Decimal(spec.factor)

    def correction(rotations: float) -> Decimal:
        turns = Decimal(spec.original_max_position) / (Decimal(rotations) * 2 * _PI)
        return dim * turns.ln() / (2 * theta.ln())

    low, high = correction(spec.beta_fast), correction(spec.beta_slow)
    if spec.truncate:
        low = low.to_integral_value(rounding="ROUND_FLOOR")
        high = high.to_integral_value(rounding="ROUND_CEILING")
    low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
    if low == high:
        high += Decimal("0.001")
    exact = []
    for i, frequency in enumerate(plain):
        ramp = min(max((Decimal(i) - low) / (high - low), Decimal(0)), Decimal(1))
        exact.append(frequency / factor * ramp + frequency * (1 - ramp))
    return exact


def _to_fp32(value: Decimal) -> float:
    """The fp32 nearest to `value`, ties to even, as a Python float (no double rounding)."""
    near = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    bits = struct.unpack("<I", struct.pack("<f", near))[0]
    candidates = [
        struct.unpack("<f", struct.pack("<I", b))[0] for b in (bits - 1, bits, bits + 1) if b >= 0
    ]
    even_first = sorted(
        candidates,
        key=lambda c: (abs(Decimal(c) - value), struct.unpack("<I", struct.pack("<f", c))[0] & 1),
    )
    return even_first[0]
