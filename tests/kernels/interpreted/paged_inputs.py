"""Sequences in pages for the attention kernels: q, k and v, and pages with NaN beyond the keys."""

import torch

from tests.kernels.product_inputs import draw
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.pointwise import embedding
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

PAGES = (4, 1, 2)
LONG, SHORT = 0, 1 << 20  # rows up to which a sequence is decoded: none, all


def sequence_of(length, dtype, head=16, query_heads=4, key_heads=2):
    """q, k, v of one sequence."""
    q = draw(length, query_heads, head, dtype=dtype) * 2
    return q, *(draw(length, key_heads, head, dtype=dtype, seed=s) for s in (1, 2))


def pages_of(k, v, length):
    """Pages that hold the first `length` keys and NaN everywhere else."""
    shape = (6, k.shape[1], 256, k.shape[2])
    pages = [torch.full(shape, torch.nan, dtype=k.dtype) for _ in "kv"]
    batch = make_batch((PagedSequence(0, length, 0, PAGES),))
    embedding.store_kv(k[:length], v[:length], *pages, batch)
    return pages


def attend(q, pages, start, short, variant, window=None, cap=0.0, sinks=None):
    batch = make_batch((PagedSequence(0, q.shape[0], start, PAGES),), short_tokens=short)
    return attention.attend(q, *pages, batch, window, variant, variant, cap, sinks)
