"""Sequences of one step that read pages far apart have the bits of each alone."""

import pytest
import torch

from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import ops
from tpdet.kernels.cpu.pointwise import embedding
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import PAGE_TOKENS

LENGTHS = (40, 2000, 700, 257)
"""With a window of 128, no row reads pages 3 to 6 of the eight that the longest has."""


def stored(lengths, key_heads=2, head=16):
    """q of every position of each sequence, pages (NaN past its end) and its page numbers."""
    needs = [-(-length // PAGE_TOKENS) for length in lengths]
    shape = (sum(needs), key_heads, PAGE_TOKENS, head)
    pages, mappings = [torch.full(shape, torch.nan) for _ in "kv"], []
    for i, (length, need) in enumerate(zip(lengths, needs, strict=True)):
        mappings.append(tuple(range(sum(needs[:i]), sum(needs[:i]) + need))[::-1])
        k, v = (draw(length, key_heads, head, dtype=torch.float32, seed=2 * i + s) for s in (0, 1))
        embedding.store_kv(k, v, *pages, make_batch((PagedSequence(0, length, 0, mappings[-1]),)))
    queries = [draw(n, 4, head, dtype=torch.float32, seed=50 + n) * 2 for n in lengths]
    return queries, pages, mappings


def attend(queries, pages, mappings, counts, window):
    """The last `counts` rows of each sequence, together."""
    sequences, parts, row = [], [], 0
    for q, mapping, count in zip(queries, mappings, counts, strict=True):
        sequences.append(PagedSequence(row, count, len(q) - count, mapping))
        parts.append(q[len(q) - count :])
        row += count
    batch = make_batch(tuple(sequences))
    return ops.paged_attention(torch.cat(parts), *pages, batch, window).split(list(counts))


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (3, 8, 1, 2), (40, 300, 1, 257)])
@pytest.mark.parametrize("window", [1, 128, 512, None])
def test_a_page_that_no_row_reads_is_passed_over(window, counts):
    queries, pages, mappings = stored(LENGTHS)
    together = attend(queries, pages, mappings, counts, window)
    for i, found in enumerate(together):
        one = slice(i, i + 1)
        (alone,) = attend(queries[one], pages, mappings[one], counts[one], window)
        assert torch.isfinite(alone).all()
        assert_same_bits(found, alone, f"length {LENGTHS[i]}")


def test_a_window_that_reaches_back_further_has_other_bits():
    """Negative control: the pages between are read where a row sees them."""
    queries, pages, mappings = stored(LENGTHS)
    near, far = (attend(queries, pages, mappings, (1,) * 4, window)[1] for window in (128, 512))
    assert not same_bits(near, far)


@pytest.mark.parametrize("sequences", [(), (PagedSequence(0, 0, 7, (1,)),)])
def test_a_step_without_rows_changes_no_page(sequences):
    queries, pages, _ = stored((40,))
    before, batch = [page.clone() for page in pages], make_batch(sequences)
    none = torch.empty(0, 2, 16)
    embedding.store_kv(none, none, *pages, batch)
    for page, kept in zip(pages, before, strict=True):
        assert_same_bits(page, kept)
    assert ops.paged_attention(queries[0][:0], *pages, batch, 128).shape == (0, 4, 16)
