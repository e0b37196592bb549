"""Rotary tables: cos and sin of fp32 angles, the same bits on every device. Device independent.

    angle = fp32(position) * inverse_frequency        (fp32, as Hugging Face computes it)
    cos, sin = fp32(factor * cos64(angle)), fp32(factor * sin64(angle))

cos64 and sin64 use fp64 additions and multiplications only (three-part reduction by pi/2 and the
minimax polynomials published with FreeBSD's and Sun's fdlibm, k_sin.c and k_cos.c), so no math
library's version can change a table. Positions below 2^22 keep the reduction exact.
"""

import torch

from tpdet.kernels.exact.rotary_frequencies import (
    MAX_POSITION,
    RotarySpec,
    attention_scaling,
    inverse_frequencies,
)

TABLE_VERSION = "rotary-table-1"
"""Names the function from frequencies and positions to tables; a change of its bits is a new one.
"""

_TWO_OVER_PI = 6.36619772367581382433e-01
_PI_HALVES = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def rotary_table(
    spec: RotarySpec,
    positions: int,
    device: torch.device | str = "cpu",
    columns: int | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, dim / 2] fp32. Raises ValueError past 2^22 positions.

    columns: past dim / 2, further ones that rotate nothing; scale: of all entries.
    """
    if positions > MAX_POSITION:
        raise ValueError(f"{positions} positions: the rotary table ends at {MAX_POSITION}")
    frequency = torch.tensor(inverse_frequencies(spec), dtype=torch.float32, device=device)
    position = torch.arange(positions, dtype=torch.float32, device=device)
    angle = (position[:, None] * frequency[None, :]).double()
    cos, sin = _cos_sin(angle)
    factor = attention_scaling(spec) * scale
    cos, sin = (cos * factor).float(), (sin * factor).float()
    if columns is None or columns == cos.shape[1]:
        return cos, sin
    rest = identity_table(positions, columns - cos.shape[1], device, scale)
    return torch.cat([cos, rest[0]], 1), torch.cat([sin, rest[1]], 1)


def identity_table(
    positions: int, columns: int, device: torch.device | str = "cpu", scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, columns] fp32, by which nothing is rotated: `scale` and 0."""
    shape = positions, columns
    return torch.full(shape, scale, device=device), torch.zeros(shape, device=device)


def head_order(head: int, rotated: int, pairs: str) -> tuple[int, ...]:
    """The order in which the values of a head [D] stand, so that D/2 pairs (i, i + D/2) do.

    The first `rotated` of them are the pairs that a table rotates, as "halves" or "neighbours"; the
    rest follow as they are. () if they already stand so.
    """
    half, rest = rotated // 2, range(rotated, head)
    first, second = list(range(half)), list(range(half, rotated))
    if pairs == "neighbours":
        first, second = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    cut = len(rest) // 2
    order = (*first, *rest[:cut], *second, *rest[cut:])
    return () if order == tuple(range(head)) else order


def _cos_sin(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 cos and sin of angles in [0, 2^23], by additions and multiplications alone."""
    turns = torch.round(angle * _TWO_OVER_PI)
    rest = angle
    for part in _PI_HALVES:
        rest = rest - turns * part
    square = rest * rest
    sin = rest + (rest * square) * _horner(_SIN, square)
    cos = (1.0 - 0.5 * square) + (square * square) * _horner(_COS, square)
    quadrant = turns.long() & 3
    odd = (quadrant & 1) == 1
    cosine, sine = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    cosine = torch.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return cosine, torch.where(quadrant >= 2, -sine, sine)


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
