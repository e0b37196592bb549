"""Radix select: the smallest prefix by sort key whose integer weight reaches a threshold.

The sort key is (value descending, id ascending); values are fp32, compared by an integer key:

    bits = int32 bits of (x + 0.0)                 -0.0 and +0.0 are one value
    key  = bits ^ ((bits >> 31) & 0x7fffffff)      as int32, monotone in x; -inf is the smallest
    unsigned key = key + 2^31, read as four digits of 8 bits, highest first

For each digit: an int64 histogram of the weights of the keys that share the digits found so far;
walk its 256 buckets from the highest until the threshold is reached; that bucket is the key's
digit. The key found is the last one of the prefix; of the ids that hold it, the lowest join until
the threshold is reached. Weights must be a function of the key (1, or the mass of the value), so
that number is ceil(what is missing / weight).

Histograms and counts are integers, and a histogram over a vocabulary is the sum of those over its
shards: the result does not depend on the layout, the thread count or a vocabulary split. A GPU
kernel that follows the four steps gets the same set.

Limits: one row, fp32 without NaN; total weight below 2^63.
"""

import torch

_BUCKETS = 256
_BLOCK_ELEMENTS = 1 << 22  # bounds the temporaries
_SIGN = 1 << 31


def unsigned_keys(values: torch.Tensor) -> torch.Tensor:
    """The sort key of each value, shifted to [0, 2^32): fp32 [N] -> int64 [N]."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + _SIGN


def select_prefix(
    values: torch.Tensor, weights: torch.Tensor | None, threshold: int
) -> torch.Tensor:
    """Mask [N] of the smallest prefix of (value desc, index asc) whose weight is >= `threshold`.

    `values` fp32 [N]; `weights` int64 [N] >= 0 (None: 1 each); `threshold` >= 1. All of it is kept
    if the whole weighs less.
    """
    keys = unsigned_keys(values)
    active, missing, prefix = keys, threshold, 0
    for shift in (24, 16, 8, 0):
        digits = (active >> shift) & (_BUCKETS - 1)
        bucket, missing = _find_bucket(_histogram(digits, weights), missing)
        if bucket < 0:
            return torch.ones_like(values, dtype=torch.bool)
        chosen = digits == bucket
        active = active[chosen]
        weights = None if weights is None else weights[chosen]
        prefix = (prefix << 8) | bucket
    weight = 1 if weights is None else int(weights[0])
    mask = keys > prefix
    ties = (keys == prefix).nonzero().view(-1)
    mask[ties[: -(-missing // weight)]] = True
    return mask


def top_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest values, best first, ties by lowest index: int64 [.., count].

    `values` fp32 [N] or rows of it [R, N], without NaN; `count` >= 1, and all N come back when it
    is N or more.
    """
    rows = values if values.dim() == 2 else values[None]
    step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    ids = torch.cat([_top_of_block(part, count) for part in rows.split(step)])
    return ids if values.dim() == 2 else ids[0]


def _top_of_block(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`top_ids` of few rows: all above the last value of each, and of equal ones the lowest."""
    x, count = rows + 0.0, min(count, rows.shape[1])
    last = torch.kthvalue(x, x.shape[1] - count + 1, dim=1, keepdim=True).values
    kept = x >= last
    if int(kept.sum()) > count * len(x):
        ahead, equal = x > last, x == last
        kept = ahead | (equal & (equal.cumsum(1) <= count - ahead.sum(1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, count)
    best_first = torch.sort(x.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, best_first)


def count_ahead(
    logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor, width: int
) -> torch.Tensor:
    """How many ids come before a given one: larger logits, and equal ones with a lower id.

    Of the first `width` columns of fp32 [R, W]: int64 [R]; chosen fp32 [R], at int64 [R].
    """
    ids = torch.arange(width)
    ahead = torch.empty_like(at)
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for first in range(0, len(logits), step):
        part = slice(first, first + step)
        x, mark = logits[part, :width], chosen[part, None]
        before = (x == mark).logical_and_(ids < at[part, None])
        ahead[part] = before.logical_or_(x > mark).sum(-1)
    return ahead


def _histogram(digits: torch.Tensor, weights: torch.Tensor | None) -> list[int]:
    if weights is None:
        return torch.bincount(digits, minlength=_BUCKETS).tolist()
    # Not bincount: its weights are floating point.
    sums = torch.zeros(_BUCKETS, dtype=torch.int64)
    return sums.scatter_add_(0, digits, weights).tolist()


def _find_bucket(histogram: list[int], missing: int) -> tuple[int, int]:
    """The bucket in which `missing` is reached from above, and what is still missing inside it."""
    for bucket in range(_BUCKETS - 1, -1, -1):
        if histogram[bucket] >= missing:
            return bucket, missing
        missing -= histogram[bucket]
    return -1, missing
