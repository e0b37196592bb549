"""The rank of a token in each of some rows of logits, on either device.

    rank(t) = 1 + #{i: x_i > x_t} + #{i < t: x_i = x_t}

1 is the likeliest id; of equal logits the lowest id comes first, as in `top_of_rows`. All that is
added are integers, so any order, cut or shard of a row gives the same rank. R rows, W columns.
"""

import torch

from tpdet.kernels import ops
from tpdet.kernels.inputs.vocabulary_shard import Shard


def token_ranks(logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Ranks int64 [R] of tokens int64 [R] in a shard's logits fp32 [R, W]; nothing is waited for.

    Called on every rank of a shard, equal on all. A row with NaN, or a negative token, gets a
    number without meaning.
    """
    width = shard.width(logits.shape[1])
    at = tokens - shard.first_id
    here = (at >= 0) & (at < width)
    chosen = logits.gather(1, at.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    chosen = torch.where(here, chosen, 0.0)
    if shard.gather is not None:
        # Exactly one rank has the token: the others' bits are zero.
        bits = shard.gather(chosen.view(torch.int32).contiguous()).sum(0)
        chosen = bits.to(torch.int32).view(torch.float32)
    ahead = ops.count_ahead(logits, chosen, at, width)
    if shard.gather is not None:
        ahead = shard.gather(ahead).sum(0)
    return ahead + 1
