"""Attention of a row with drafts, in Triton's interpreter: the bits of its positions decoded alone.

Every end around the first and the second page's, whatever stands behind it: keys of drafts that
were wrong lie there, and where the right ones are stored over them afterwards.
"""

import pytest
import torch

from tests.kernels.interpreted.attention.test_decode import VARIANTS, decode
from tests.kernels.interpreted.paged_inputs import PAGES, sequence_of
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.control.plan import PlanRows, Row
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.runner.graphs.packed_step import (
    BatchShape,
    StepShape,
    StepSpans,
    pack_step,
    packed_batches,
)

ENDS = (*range(250, 261), *range(506, 517))
COUNTS = (2, 3, 5, 8, 16)
LENGTH, WINDOW = 530, 77


def drafted(spans):
    """A graph's batch of rows with drafts: (start, count) of sequences that share their pages."""
    made = [Row(i, 0, 0, s, (5,) * n, PAGES, (1, 1, 1), n, n) for i, (s, n) in enumerate(spans)]
    rows, room = PlanRows.of(made), sum(count for _, count in spans) + 2
    shape = StepShape((BatchShape(room, len(spans) + 1, 0, 4 * len(spans), 3, 16),))
    buffer = torch.full((shape.words,), 77, dtype=torch.int32)
    pack_step(rows, shape, StepSpans.of(rows, 3, 5).within(shape), buffer, 5)
    return packed_batches(shape, buffer, 5)[1][0]


def empty_pages(k):
    return [torch.full((6, k.shape[1], 256, k.shape[2]), torch.nan, dtype=k.dtype) for _ in "kv"]


def store(k, v, pages, start, end):
    for position in range(start, end):
        for page, x in zip(pages, (k, v), strict=True):
            page[PAGES[position // 256], :, position % 256] = x[position]


def alone(q, k, v, position, window):
    """The row at a position, decoded over pages that hold no key behind it."""
    pages = empty_pages(k)
    store(k, v, pages, 0, position + 1)
    batch = make_batch((PagedSequence(0, 1, position, PAGES),))
    return decode(q[position : position + 1], pages, batch, VARIANTS[0], window)


def after_wrong_drafts(q, k, v, end, count, variant, window):
    """The last `count` rows before `end`, after a step whose drafts from the second on were wrong.

    The wrong ones reached further, so that some keys are stored over and others stay.
    """
    start, last = end - count, min(end + 3, LENGTH)
    pages = empty_pages(k)
    store(k, v, pages, 0, start)
    wrong = [torch.flip(x, (0,)) * 3 for x in (k, v)]
    store(k, v, pages, start, start + 1)
    store(*wrong, pages, start + 1, last)
    query = torch.full((count + 2, *q.shape[1:]), torch.nan, dtype=q.dtype)
    query[:count] = q[start:end]
    spoiled = decode(query, pages, drafted([(start, count)]), variant, window)
    store(k, v, pages, start, end)
    return spoiled[:count], decode(query, pages, drafted([(start, count)]), variant, window)[:count]


def check_ends(ends, window, tried, **shape):
    q, k, v = sequence_of(LENGTH, torch.float16, **shape)
    known = {}
    for end in ends:
        for count, variant in tried(end):
            places = range(end - count, end)
            for place in places:
                if place not in known:
                    known[place] = alone(q, k, v, place, window)
            wanted = torch.cat([known[place] for place in places])
            spoiled, got = after_wrong_drafts(q, k, v, end, count, variant, window)
            assert_same_bits(got, wanted, f"end {end}, {count} rows, {variant}")
            assert_same_bits(spoiled[:1], wanted[:1], "a wrong draft reaches no row before it")
            if same_bits(spoiled, wanted):
                raise AssertionError("wrong keys reached no bit: this test shows nothing")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_with_drafts_at_the_ends_of_pages_have_the_bits_of_decoding(window):
    few = (255, 257, 512) if window is None else (256, 513)
    tried = {end: [(COUNTS[(end + 3) % 5], VARIANTS[end % 5])] for end in few}
    check_ends(few, window, tried.get, query_heads=2, key_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_with_drafts_at_every_end_have_the_bits_of_decoding(window):
    """Every end with every variant, and with every number of rows."""
    tried = lambda end: [(COUNTS[(end + i) % 5], variant) for i, variant in enumerate(VARIANTS)]
    check_ends(ENDS, window, tried, query_heads=2, key_heads=1)
