"""Temperature and the three filters, on one row of logits: which ids may be drawn.

    temperature  x = x / fp32(T) + 0.0      true division; overflow held at the largest finite fp32
    top-k        the first k of the order (value desc, id asc): exactly k, low ids on ties
    top-p        q_i = round(exp(x_i - max) * 2^40) of what is left, total = sum of q (int64)
                 P = max(1, round_half_even(p * 2^30))            2^30 turns the filter off
                 threshold = ceil(P * total / 2^30)
                 the smallest prefix of the order whose q sum to >= threshold
    min-p        x_i >= max + fp32(ln(min_p))                     fp32 addition; ln rounded once

Every filter keeps the largest. A threshold is a number of the whole vocabulary, found with integer
sums and maxima only, so a vocabulary split over shards finds the same one. P * total may exceed 64
bits; with total = h * 2^30 + l it is P * h + ceil(P * l / 2^30), and both products fit (P <= 2^30,
total < 2^63): a GPU computes it so.
"""

from decimal import Decimal

import torch

from tpdet.kernels.cpu.sampling.log_softmax import fixed_point_mass
from tpdet.kernels.cpu.sampling.penalties import hold_finite
from tpdet.kernels.cpu.sampling.sort_keys import select_prefix

TOP_P_BITS = 30


def scale_by_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over a temperature > 0: fp32 [N] -> fp32 [N]."""
    # A tensor, not a number: torch may multiply by the reciprocal of a number.
    divisor = torch.tensor([temperature], dtype=torch.float32)
    return hold_finite(logits / divisor, logits).add_(0.0)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k largest: fp32 [N] -> bool [N] with exactly min(k, N) set."""
    return select_prefix(logits, None, k)


def top_p_numerator(top_p: float) -> int:
    """P, the filter's share in units of 2^-30; 2^30 keeps everything."""
    return max(1, round(top_p * (1 << TOP_P_BITS)))


def top_p_threshold(numerator: int, total: int) -> int:
    """ceil(numerator * total / 2^30) without leaving 64 bits."""
    high, low = total >> TOP_P_BITS, total & ((1 << TOP_P_BITS) - 1)
    return numerator * high + ((numerator * low + (1 << TOP_P_BITS) - 1) >> TOP_P_BITS)


def keep_top_p(logits: torch.Tensor, numerator: int) -> torch.Tensor:
    """Mask of the smallest prefix that holds the share: fp32 [N] (max finite) -> bool [N]."""
    mass = fixed_point_mass(logits, logits.amax())
    return select_prefix(logits, mass, top_p_threshold(numerator, int(mass.sum())))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask of ids at least `min_p` (> 0) times as likely as the likeliest: fp32 [N] -> bool [N]."""
    # decimal, not math.log: correctly rounded on every machine.
    distance = torch.tensor(float(Decimal(min_p).ln()), dtype=torch.float32)
    return logits >= logits.amax() + distance
