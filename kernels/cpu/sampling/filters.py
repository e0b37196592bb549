"""Temperature and the three filters, on one row of logits: which ids may be sampled.

    temperature  x = x / fp32(T) + 0.0      true division; overflow held at the largest finite fp32
    top-k        the first k by sort key (value desc, id asc): exactly k, low ids on ties
    top-p        q_i = round(exp(x_i - max) * 2^40) of the kept ids, total = sum of q (int64)
                 P and threshold                                  `kernels/exact/thresholds.py`
                 the smallest prefix by sort key whose q sum to >= threshold
    min-p        x_i >= max + fp32(ln(min_p))                     fp32 addition; ln rounded once

Every filter keeps the largest. A threshold is a number of the whole vocabulary, found with integer
sums and maxima only, so a vocabulary split over shards finds the same one.
"""

import torch

from tpdet.kernels.cpu.sampling.log_softmax import fixed_point_mass
from tpdet.kernels.cpu.sampling.sort_keys import select_prefix
from tpdet.kernels.exact.thresholds import hold_finite, min_p_distance, top_p_threshold


def scale_by_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over a temperature > 0: fp32 [N] -> fp32 [N]."""
    # A tensor, not a number: torch may multiply by the reciprocal of a number.
    divisor = torch.tensor([temperature], dtype=torch.float32)
    return hold_finite(logits / divisor, logits).add_(0.0)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k largest: fp32 [N] -> bool [N] with exactly min(k, N) set."""
    return select_prefix(logits, None, k)


def keep_top_p(logits: torch.Tensor, numerator: int) -> torch.Tensor:
    """Mask of the smallest prefix that holds the share: fp32 [N] (max finite) -> bool [N]."""
    mass = fixed_point_mass(logits, logits.amax())
    return select_prefix(logits, mass, top_p_threshold(numerator, int(mass.sum())))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask of ids at least `min_p` (> 0) times as likely as the likeliest: fp32 [N] -> bool [N]."""
    return logits >= logits.amax() + torch.tensor(min_p_distance(min_p), dtype=torch.float32)
