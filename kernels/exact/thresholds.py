"""Numbers that sampling compares with, the same on every device.

    P          = max(1, round_half_even(p * 2^30))                     2^30 turns top-p off
    threshold  = ceil(P * total / 2^30)                                total: the softmax mass
    distance   = ln(min_p)                                             rounded once
    log p_i    = fp32( (fp64(x_i) - fp64(max)) - log_mass )            fp64 subtractions

P * total may exceed 64 bits; with total = h * 2^30 + l it is P * h + ceil(P * l / 2^30), and both
products fit (P <= 2^30, total < 2^63): a GPU computes it so.
"""

from decimal import Decimal

import torch

from tpdet.kernels.order import TOP_P_BITS

KEEP_ALL = 1 << TOP_P_BITS
"""The P that keeps every id."""
MAX_VOCABULARY = 1 << 22
"""Ids that an int64 mass holds, each with at most 2^40 of it."""
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126


def top_p_numerator(top_p: float) -> int:
    """P, the filter's share in units of 2^-30; 2^30 keeps everything."""
    return max(1, round(top_p * KEEP_ALL))


def top_p_threshold(numerator: int, total: int) -> int:
    """ceil(numerator * total / 2^30) without leaving 64 bits."""
    high, low = total >> TOP_P_BITS, total & (KEEP_ALL - 1)
    return numerator * high + ((numerator * low + KEEP_ALL - 1) >> TOP_P_BITS)


def min_p_distance(min_p: float) -> float:
    """How far below the largest logit min-p (> 0) keeps ids: ln(min_p)."""
    return float(Decimal(min_p).ln())  # decimal, not math.log: correctly rounded everywhere


def held_repetition(penalty: float) -> float:
    """A repetition penalty in the normal range of fp32, so that 0 * inf cannot make a NaN."""
    return min(max(penalty, FLOAT32_TINY), FLOAT32_MAX)


def hold_finite(scaled: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`scaled`, overflow held at the largest finite fp32; -inf stays where `original` has it."""
    held = scaled.clamp(-FLOAT32_MAX, FLOAT32_MAX)
    return held.masked_fill_(original == -torch.inf, -torch.inf)


def scale_by_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over a temperature > 0: fp32 [..., N] -> fp32 [..., N]."""
    # A tensor, not a number: torch may multiply by the reciprocal of a number.
    divisor = torch.tensor([temperature], dtype=torch.float32, device=logits.device)
    return hold_finite(logits / divisor, logits).add_(0.0)


def check_vocabulary(vocabulary: int) -> None:
    """Raise ValueError for more ids than a mass holds."""
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"vocabulary of {vocabulary} ids; the int64 mass holds {MAX_VOCABULARY}")


def log_probabilities(
    values: torch.Tensor, maximum: torch.Tensor, log_masses: torch.Tensor
) -> torch.Tensor:
    """log p of logits picked from rows: fp32 [..], maximum fp32, log_masses fp64 -> fp32 [..]."""
    distance = values.to(torch.float64) - maximum.to(torch.float64)
    return (distance - log_masses).to(torch.float32)
