"""Decode attention by programs that stay, on a GPU: bits at any lengths and numbers of programs.

Each batch is held against the first two-kernel form. Multiprocessors that are left free change the
programs, and so where the line of work is cut.
"""

import random
from dataclasses import replace

import torch

from tests.gpu.attention.decode import PREFILL, STREAMED, attend, stored
from tests.gpu.lib.checks import same
from tests.gpu.lib.suite import Check
from tests.lib.kernels.decode_reference import attend_reference
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.launch.multiprocessors import leaving
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

EDGES = (
    1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 511, 512, 513, 700, 767,
    768, 769, 1023, 1024, 1025, 1100,
)  # fmt: skip
SHAPES = [  # query heads and key heads, head, dtype, most rows of a sequence
    ((32, 8), 128, torch.bfloat16, 4),
    ((32, 4), 128, torch.float16, 2),
    ((8, 8), 128, torch.bfloat16, 1),
    ((14, 2), 64, torch.bfloat16, 2),
    ((16, 1), 128, torch.bfloat16, 1),
]


def chosen_lengths(most, count):
    return [random.Random(i).randrange(1, most) for i in range(count)]


LENGTHS = {
    "one key": [1],
    "one sequence of 32,000": [32000],
    "short ones beside 32,768": [200] * 30 + [32768] + [1, 700] * 10,
    "256 up to 600": chosen_lengths(601, 256),
    "64 up to 5,000": chosen_lengths(5000, 64),
}


def padded(batch, more=3):
    """The batch with sequences without rows behind, as a captured graph has them."""
    longer = lambda x: torch.cat([x, torch.zeros_like(x[:1]).expand(more, -1)])
    return replace(batch, rows=longer(batch.rows), tables=longer(batch.tables))


def streamed_lengths(lengths, kind, heads=(32, 8), head=128, dtype=torch.bfloat16, most=1):
    """Sequences of these lengths, each with 1 to `most` rows: every choice of programs."""
    queries, pages, mappings = stored(lengths, heads, head, dtype, kind)
    chance, sequences, parts, row = random.Random(1), [], [], 0
    for q, length, mapping in zip(queries, lengths, mappings, strict=True):
        count = min(length, chance.randrange(1, most + 1))
        sequences.append(PagedSequence(row, count, length - count, mapping))
        parts.append(q[length - count :])
        row += count
    q, batch = torch.cat(parts), make_batch(tuple(sequences), "cuda")
    wanted = attend_reference(q, *pages, batch, None)
    least = batch.short_rows * heads[0] // heads[1]
    for each in (batch, padded(batch)):
        for free in (0, 1, 50, 100, 129, 131):
            for variant in STREAMED:
                if variant.rows >= least:
                    with leaving(free):
                        got = attend(q, pages, each, variant)
                    same(got, wanted, f"{kind}, {free} left free, {variant}")


def rows_change_on_the_device():
    """A graph replayed while the lengths of its sequences change."""
    queries, pages, mappings = stored([1500] * 24, kind="heavy")
    q = torch.cat([x[:1] for x in queries])

    def batch_of(lengths):
        each = enumerate(zip(lengths, mappings, strict=True))
        return make_batch(tuple(PagedSequence(i, 1, n - 1, m) for i, (n, m) in each), "cuda")

    batch, variant = batch_of([1500] * 24), STREAMED[0]
    attend(q, pages, batch, variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(q, *pages, batch, None, PREFILL, variant)
    for turn in range(100):
        chance = random.Random(turn)
        now = batch_of([chance.randrange(1, chance.choice((2, 100, 300, 1501))) for _ in mappings])
        batch.rows.copy_(now.rows)
        out.fill_(torch.nan)
        graph.replay()
        same(out, attend_reference(q, *pages, now, None), f"turn {turn}")


def streamed_checks():
    """Every check of bits."""
    kinds = "normal", "heavy", "cancelling", "tiny"
    return [
        *(
            Check(f"streamed, {name}", streamed_lengths, (n, "heavy"))
            for name, n in LENGTHS.items()
        ),
        *(Check(f"streamed, ends of pages, {k}", streamed_lengths, (EDGES, k)) for k in kinds),
        *(
            Check(f"streamed, {heads} heads of {head}", streamed_lengths, (EDGES, "heavy", *shape))
            for shape in SHAPES
            for heads, head, *_ in [shape]
        ),
        Check("streamed, rows change on the device", rows_change_on_the_device),
    ]
