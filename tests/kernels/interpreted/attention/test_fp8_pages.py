"""Pages in fp8 in Triton's interpreter: stored bytes are the CPU's, and attention reads numbers.

Attention over fp8 pages has the bits of attention over pages that hold the numbers they stand for.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreted.paged_inputs import LONG, PAGES, SHORT, attend, sequence_of
from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.some_slow import some_slow
from tpdet.kernels.cpu.pointwise import embedding as cpu_embedding
from tpdet.kernels.cpu.pointwise import rotate_and_store as cpu_rotation
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.pointwise import embedding
from tpdet.kernels.cuda.pointwise.rotate_and_store import HeadShare, rotate_and_store_as
from tpdet.kernels.exact.fp8_rows import decode_rows, fp8_page_bytes, rows_of
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.known.kv_golden import golden_rows

WIDE = AttentionVariant(64, 4, 1, swapped=True)


def fp8_pages(key_heads, head, filled=255):
    """A page pair, all NaN until written."""
    shape = (6, key_heads, fp8_page_bytes(head))
    return [torch.full(shape, filled, dtype=torch.uint8) for _ in "kv"]


@pytest.mark.parametrize("dtype", some_slow([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_golden_rows_are_stored_as_on_the_cpu(dtype):
    """By the store alone, and behind the rotation by an angle of 0."""
    rows = golden_rows(dtype)[40:]
    k, v = rows[:, None].contiguous(), rows.flip(0)[:, None].contiguous()
    batch = make_batch((PagedSequence(0, len(rows), 220, PAGES),))
    tables = torch.ones(400, 32), torch.zeros(400, 32)
    q = draw(len(rows), 1, 64, dtype=dtype)
    ours, theirs = fp8_pages(1, 64), fp8_pages(1, 64)
    embedding.store_kv(k, v, *ours, batch)
    cpu_embedding.store_kv(k, v, *theirs, batch)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other, f"stored, {dtype}")
    how = q, k, v, tables, (None, None), 1e-6
    wanted = cpu_rotation.rotate_and_store(*how, theirs, batch)
    assert_same_bits(rotate_and_store_as(*how, ours, batch, HeadShare(2, 1)), wanted)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other, f"rotated and stored, {dtype}")


def test_attention_reads_the_numbers_that_codes_stand_for():
    """Prefill and decode, a window, and NaN in whatever no key is in."""
    length, head = 300, 16
    q, k, v = sequence_of(length, torch.float16, head, query_heads=2, key_heads=1)
    k, v = k * 37.0, v * 0.01
    batch = make_batch((PagedSequence(0, length, 0, PAGES),))
    stored = fp8_pages(1, head)
    cpu_embedding.store_kv(k, v, *stored, batch)
    numbers = [decode_rows(*rows_of(pages, head), torch.float16) for pages in stored]
    whole = attend(q[280:], numbers, 280, LONG, AttentionVariant(16, 4, 1))
    assert_same_bits(attend(q[280:], stored, 280, LONG, WIDE), whole, "prefill")
    got = attend(q[-3:], stored, length - 3, SHORT, WIDE)
    assert_same_bits(got, whole[-3:], "decode")
    fused = replace(WIDE, fused=True)
    got = attend(q[-3:], stored, length - 3, SHORT, fused, 77)
    wanted = attend(q[-3:], numbers, length - 3, SHORT, AttentionVariant(16, 4, 1), 77)
    assert_same_bits(got, wanted, "decode, window")
    rows_of(stored[1], head)[1][PAGES[0]] ^= 1
    assert not same_bits(attend(q[-3:], stored, length - 3, SHORT, fused), whole[-3:])
    for form in (AttentionVariant(16, 4, 1, swapped=True), AttentionVariant(64, 4, 1)):
        with pytest.raises(ValueError, match="attention over fp8 pages has 64 rows"):
            attend(q[-3:], stored, length - 3, SHORT, form)
