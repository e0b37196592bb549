"""Attention over packed sequences, and over pages, to which new keys and values are written.

Shapes: M rows of all sequences, Hq query heads, Hkv key heads, D values of a head, P pages.

Packed rows stand sequence by sequence, each from its position 0 on. The rows of a step over pages
have sequences too: `starts[b]` positions are stored before its `counts[b]` rows, and `pages` names
the pages of all sequences in turn, as many of each as its positions take.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence, make_batch
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.nn.operators.declare import operator, same_shape, wide


def page_count(positions: int) -> int:
    """Pages that so many positions take."""
    return -(-positions // PAGE_TOKENS)


def packed_batch(lengths: Sequence[int], device: torch.device) -> PagedBatch:
    """Sequences of these lengths, each whole, on pages of their own from page 0 on."""
    pages = range(sum(map(page_count, lengths)))
    return paged_batch([0] * len(lengths), lengths, pages, device)


def paged_batch(
    starts: Sequence[int], counts: Sequence[int], pages: Sequence[int], device: torch.device
) -> PagedBatch:
    """The batch of a step over pages. Raises ValueError for too many pages or too few."""
    sequences, row, page = [], 0, 0
    for start, count in zip(starts, counts, strict=True):
        last = page + page_count(start + count)
        sequences.append(PagedSequence(row, count, start, tuple(pages[page:last])))
        row, page = row + count, last
    if page != len(pages):
        raise ValueError(f"{len(pages)} pages, and the sequences take {page}: name these alone")
    return make_batch(tuple(sequences), device)


def _attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    window: int | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """By sequence and key head: the scores of one at a time are in memory."""
    groups, mixed = k.shape[1], []
    shared = [None] * groups if sinks is None else wide(sinks).chunk(groups)
    parts = [wide(x).split([*lengths]) for x in (q, k, v)]
    for queries, keys, values in zip(*parts, strict=True):
        heads = zip(queries.chunk(groups, 1), keys.unbind(1), values.unbind(1), shared, strict=True)
        outputs = [checkpoint(_attend, *head, window, cap, use_reentrant=False) for head in heads]
        mixed.append(torch.cat(outputs, 1))
    return torch.cat(mixed)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, window: int | None, cap: float
) -> Tensor:
    """q [T, h, D], k and v [T, D], sink [h] -> [T, h, D], causal."""
    score = torch.einsum("thd,sd->hts", q, k) / math.sqrt(q.shape[2])
    if cap:
        score = torch.tanh(score / cap) * cap
    place = torch.arange(len(k), device=k.device)
    distance = place[:, None] - place
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    score = score.masked_fill(~seen, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink[:, None, None].expand(-1, len(k), 1)], -1)
    return torch.einsum("hts,sd->thd", score.softmax(-1)[..., : len(k)], v)


@operator(same_shape, _attention_reference)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    window: int | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [M, Hq, D], k and v [M, Hkv, D] of packed sequences -> [M, Hq, D], causal.

    Query head h reads key head h // (Hq / Hkv). window: positions that a row sees, itself among
    them, or None; cap: of scores, 0 for none; sinks: fp32 [Hq], or None.
    """
    batch = packed_batch(lengths, q.device)
    shape = sum(map(page_count, lengths)), k.shape[1], PAGE_TOKENS, k.shape[2]
    pages = k.new_empty(shape), v.new_empty(shape)
    ops.store_kv(k, v, *pages, batch)
    return ops.paged_attention(q, *pages, batch, window, cap, sinks)


@operator(same_shape, mutates=("key_pages", "value_pages"))
def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    key_pages: Tensor,
    value_pages: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    pages: Sequence[int],
) -> Tensor:
    """Rotated q [M, Hq, D]; k and v [M, Hkv, D] go to pages; cos, sin: fp32 [positions, D / 2]."""
    batch = paged_batch(starts, counts, pages, q.device)
    memory = key_pages, value_pages
    return ops.rotate_and_store(q, k, v, (cos, sin), (query_norm, key_norm), eps, memory, batch)


@operator(same_shape)
def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    pages: Sequence[int],
    window: int | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [M, Hq, D] over pages [P, Hkv, 256, D] that hold its rows' keys, too -> [M, Hq, D]."""
    batch = paged_batch(starts, counts, pages, q.device)
    return ops.paged_attention(q, key_pages, value_pages, batch, window, cap, sinks)
