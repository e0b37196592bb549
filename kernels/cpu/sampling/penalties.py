"""Bias and penalties on one row of logits, the first part of the frozen order.

    bias         x[i] = x[i] + fp32(bias_i)
    repetition   x[i] = x[i] / r if x[i] > 0 else x[i] * r        i in prompt or output
    frequency    x[i] = x[i] - fp32(f) * fp32(count_i)            count of i in the output
    presence     x[i] = x[i] - fp32(p)                            i in the output
    forbidden    x[i] = -inf                                      by select, whatever x[i] holds
    allowed      x[i] = -inf                                      by select, i not in the mask

Each operation rounds to fp32 once; nothing is fused. r is rounded to fp32 and held in the normal
range [2^-126, (2 - 2^-23) * 2^127], so that 0 * inf cannot make a NaN, and a finite logit that
overflows becomes the largest finite fp32 of its sign. "Output" begins at the original prompt
length, also after a preemption. Repetition as in Hugging Face transformers, frequency and presence
as in OpenAI's API; all of it in vLLM's order.
"""

import torch

from tpdet.kernels.exact.allowed_ids import unpack_bits
from tpdet.kernels.exact.thresholds import held_repetition, hold_finite


def add_bias(logits: torch.Tensor, bias: dict[int, float]) -> None:
    """Add a bias to some ids, in place: fp32 [V]."""
    ids = torch.tensor(list(bias), dtype=torch.int64)
    logits[ids] += torch.tensor(list(bias.values()), dtype=torch.float32)


def penalise_repetition(logits: torch.Tensor, ids: torch.Tensor, penalty: float) -> None:
    """Shrink the logits of every id in `ids` (int64, any order, repeats count once), in place."""
    seen = torch.unique(ids)
    factor = torch.tensor([held_repetition(penalty)], dtype=torch.float32)
    values = logits[seen]
    logits[seen] = hold_finite(torch.where(values > 0, values / factor, values * factor), values)


def penalise_frequency_and_presence(
    logits: torch.Tensor, ids: torch.Tensor, frequency: float, presence: float
) -> None:
    """Lower the logits of ids in the output, in place: `ids` int64, one per output token."""
    seen, counts = torch.unique(ids, return_counts=True)
    values = logits[seen]
    if frequency != 0.0:
        values = values - torch.tensor([frequency], dtype=torch.float32) * counts.to(torch.float32)
    if presence != 0.0:
        values = values - torch.tensor([presence], dtype=torch.float32)
    logits[seen] = values


def forbid(logits: torch.Tensor, ids: tuple[int, ...]) -> None:
    """Make ids impossible, in place."""
    logits[torch.tensor(ids, dtype=torch.int64)] = -torch.inf


def keep_allowed(logits: torch.Tensor, allowed: bytes) -> None:
    """Make all ids impossible but those whose bit is set, in place."""
    logits.masked_fill_(~unpack_bits([allowed], logits.device)[0, : len(logits)], -torch.inf)
