"""How many ids of a row come before a given one: larger logits, and equal ones with a lower id."""

import torch

_BLOCK_ELEMENTS = 1 << 22  # bounds the temporaries


def count_ahead(
    logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor, width: int
) -> torch.Tensor:
    """Of the first `width` columns of fp32 [R, W]: int64 [R]; chosen fp32 [R], at int64 [R]."""
    ids = torch.arange(width)
    ahead = torch.empty_like(at)
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for first in range(0, len(logits), step):
        part = slice(first, first + step)
        x, mark = logits[part, :width], chosen[part, None]
        before = (x == mark).logical_and_(ids < at[part, None])
        ahead[part] = before.logical_or_(x > mark).sum(-1)
    return ahead
