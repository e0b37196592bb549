"""Attention at every length, whole and in random chunks, several sequences a launch.

A sequence's first rows are those of every shorter one (attention looks back only), so one long
sequence holds the reference of all lengths; each length is computed as a separate sequence, on
separate pages that hold NaN elsewhere.
"""

import random

import torch

from tests.gpu.attention.case import ALL_LONG, ALL_SHORT, DECODE, PAGE, PREFILL, SHAPES, Case
from tests.gpu.lib.checks import same
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

LONGEST = 1100
_TOGETHER = 8  # sequences in one launch: all short, their workspace takes 1 GB
_CHUNKS = (1, 1, 2, 7, 16, 64, 130, 256, 600)


def every_length(kind="normal"):
    """Lengths 1 to 1,100, each whole and cut at random; variants and ways drawn by launch."""
    data, chance, chunks = Case(SHAPES[0], LONGEST, kind), random.Random(kind), 0
    lengths = chance.sample(range(1, LONGEST + 1), LONGEST)  # short beside long
    for first in range(0, LONGEST, _TOGETHER):
        group = lengths[first : first + _TOGETHER]
        chunks += run_group(data, group, chance, lambda left: left) - len(group)
        chunks += run_group(data, group, chance, lambda _: chance.choice(_CHUNKS))
    return {"lengths": len(lengths), "chunks": chunks}


def run_group(data, lengths, chance, cut):
    """Sequences of these lengths side by side, `cut(rows left)` rows of each a launch."""
    need = [-(-length // PAGE) for length in lengths]
    order = chance.sample(range(sum(need) + 3), sum(need))
    mappings = [tuple(order.pop() for _ in range(count)) for count in need]
    pages, done, chunks = data.pool(sum(need) + 3), [0] * len(lengths), 0
    while spans := _next_spans(lengths, done, cut):
        _attend_spans(data, pages, mappings, spans, chance)
        for index, _, end in spans:
            done[index] = end
        chunks += len(spans)
    return chunks


def _next_spans(lengths, done, cut):
    """(sequence, first, end) of the next chunk of each sequence that has rows left."""
    return [
        (index, first, first + min(cut(length - first), length - first))
        for index, (length, first) in enumerate(zip(lengths, done, strict=True))
        if first < length
    ]


def _attend_spans(data, pages, mappings, spans, chance):
    """One launch over a chunk of each sequence, against the same rows of the reference."""
    sequences, row = [], 0
    for index, first, end in spans:
        sequences.append(PagedSequence(row, end - first, first, mappings[index]))
        row += end - first
    batch = make_batch(tuple(sequences), "cuda", chance.choice((ALL_LONG, 16, ALL_SHORT)))
    rows = torch.cat([torch.arange(first, end) for _, first, end in spans]).cuda()
    keys, values = data.k[rows], data.v[rows]
    data.store_rows(keys, values, pages, batch)
    ways = chance.choice(PREFILL), chance.choice(DECODE)
    found = data.attend(data.q[rows], pages, batch, *ways)
    same(found, data.reference[rows], f"chunks (sequence, first, end) {spans}, {ways}")
