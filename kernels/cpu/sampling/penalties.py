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

from collections.abc import Sequence

import torch

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126


def add_bias(logits: torch.Tensor, bias: dict[int, float]) -> None:
    """Add a bias to some ids, in place: fp32 [V]."""
    ids = torch.tensor(list(bias), dtype=torch.int64)
    logits[ids] += torch.tensor(list(bias.values()), dtype=torch.float32)


def penalise_repetition(logits: torch.Tensor, ids: torch.Tensor, penalty: float) -> None:
    """Shrink the logits of every id in `ids` (int64, any order, repeats count once), in place."""
    seen = torch.unique(ids)
    factor = torch.tensor([min(max(penalty, FLOAT32_TINY), FLOAT32_MAX)], dtype=torch.float32)
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


def unpack_bits(masks: Sequence[bytes], device: torch.device) -> torch.Tensor:
    """Masks of one length, the lowest bit of a byte first: bool [masks, 8 * bytes]."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    return (packed.view(len(masks), -1, 1) & bits).ne(0).flatten(1)


def hold_finite(scaled: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`scaled`, overflow held at the largest finite fp32; -inf stays where `original` has it."""
    held = scaled.clamp(-FLOAT32_MAX, FLOAT32_MAX)
    return held.masked_fill_(original == -torch.inf, -torch.inf)
