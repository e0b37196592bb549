"""Decode attention and the rotation that stores, in Triton's interpreter."""

import pytest
import torch

from tests.kernels.interpreted.paged_inputs import PAGES, pages_of, sequence_of
from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels import decode_reference
from tests.lib.kernels.decode_reference import attend_reference
from tests.lib.pairwise import pairwise
from tests.lib.some_slow import some_slow
from tpdet.control.plan import PlanRows, Row
from tpdet.kernels.cpu.pointwise import rotate_and_store as cpu_rotation
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention import decode_launch as attention_decode_launch
from tpdet.kernels.cuda.attention.decode import SplitStates
from tpdet.kernels.cuda.attention.decode_launch import arrival_counters
from tpdet.kernels.cuda.attention.operands import AttentionShape
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.pointwise import embedding, rotary
from tpdet.kernels.cuda.pointwise.rotate_and_store import (
    FEW_ROWS,
    MANY_ROWS,
    HeadShare,
    rotate_and_store_as,
)
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence, make_batch
from tpdet.runner.graphs.packed_step import (
    BatchShape,
    StepShape,
    StepSpans,
    pack_step,
    packed_batches,
)

VARIANTS = (
    AttentionVariant(16, 4, 1),
    AttentionVariant(16, 4, 1, fused=True),
    AttentionVariant(16, 4, 1, swapped=True),
    AttentionVariant(16, 4, 1, fused=True, swapped=True),
    AttentionVariant(64, 4, 1, fused=True, swapped=True),
)
PREFILL = AttentionVariant(64, 4, 1)


def decode(q, pages, batch, variant, window=None):
    out = attention.attend(q, *pages, batch, window, PREFILL, variant)
    counters = arrival_counters(1, q.device)
    if counters.any():
        raise AssertionError(f"{variant}: arrivals are left over: {counters.nonzero()}")
    return out


@pytest.mark.parametrize("length", some_slow([1, 257, 530], [1, 65, 256, 257, 530]))
def test_every_variant_has_the_bits_of_two_kernels_at_every_tail(length):
    """Every other variant in fp16 without a window, the others in fp32 with one."""
    odd = length % 2
    for dtype, head, window, variants in (
        (torch.float16, 16, None, VARIANTS[odd::2]),
        (torch.float32, 48, 77, VARIANTS[1 - odd :: 2]),
    ):
        q, k, v = sequence_of(530, dtype, head=head, query_heads=2, key_heads=1)
        pages = pages_of(k, v, length)
        count = min(length, 3)
        batch = make_batch((PagedSequence(0, count, length - count, PAGES),))
        part = q[length - count : length]
        wanted = attend_reference(part, *pages, batch, window)
        for variant in variants:
            got = decode(part, pages, batch, variant, window)
            assert_same_bits(got, wanted, f"{dtype} length {length} {variant}")


def test_many_rows_of_a_sequence_keep_their_bits():
    """More rows than a program has: every part merges its own, with its own splits in a window."""
    for window, variant in ((None, VARIANTS[3]), (60, VARIANTS[1])):
        q, k, v = sequence_of(530, torch.float16, query_heads=2, key_heads=1)
        pages = pages_of(k, v, 530)
        first = 518
        batch = make_batch((PagedSequence(0, 530 - first, first, PAGES),))
        wanted = attend_reference(q[first:], *pages, batch, window)
        got = decode(q[first:], pages, batch, variant, window)
        assert_same_bits(got, wanted, f"{window} {variant}")


def padded(sequences, rows, splits):
    """A batch as a captured graph has it: pad splits and rows belong to a sequence without rows."""
    batch = make_batch(sequences)
    height = len(sequences)

    def more(x, row, count):
        pad = torch.tensor([row] * (count - x.shape[0]), dtype=x.dtype).view(-1, *x.shape[1:])
        return torch.cat([x, pad])

    return PagedBatch(
        sequences,
        batch.positions,
        batch.slots,
        more(batch.tables, [0] * batch.tables.shape[1], height + 1),
        more(batch.rows, [0, 0, 0], height + 1),
        batch.blocks,
        more(batch.splits, [height, 0], splits),
        more(batch.short, [height, 0], rows),
        batch.states,
        batch.pieces,
        batch.runs,
        1,
    )


def test_a_batch_with_pads_gives_each_sequence_its_own_bits():
    lengths, numbers = (300, 1, 256, 600), ((0, 1), (2,), (3,), (4, 5, 6))
    pages = [torch.full((8, 2, 256, 16), torch.nan, dtype=torch.float16) for _ in "kv"]
    sequences, queries, alone = [], [], []
    for index, (length, mapping) in enumerate(zip(lengths, numbers, strict=True)):
        q, k, v = (x[:length] for x in sequence_of(600 + index, torch.float16))
        stored = make_batch((PagedSequence(0, length, 0, mapping),))
        embedding.store_kv(k, v, *pages, stored)
        one = make_batch((PagedSequence(0, 1, length - 1, mapping),))
        alone.append(attend_reference(q[-1:], *pages, one, None))
        queries.append(q[-1:])
        sequences.append(PagedSequence(index, 1, length - 1, mapping))
    batch = padded(tuple(sequences), 6, 16)
    for variant in (VARIANTS[0], VARIANTS[4]):
        for _ in range(1 + variant.fused):  # the counters serve again
            got = decode(torch.cat(queries), pages, batch, variant)
            assert_same_bits(got, torch.cat(alone), f"{variant}")


def test_a_packed_step_gives_the_bits_of_its_rows():
    """Chunk and decode rows in two halves of a graph's shape; pads hold NaN, and touch nothing."""
    q, k, v = sequence_of(530, torch.float16, query_heads=2, key_heads=1)
    pages = pages_of(k, v, 530)
    spans = ((529, 1), (40, 1), (250, 20))  # (start, count): all of one sequence's keys
    made = [Row(0, 0, 0, start, (5,) * count, PAGES, (1, 1, 1), 1) for start, count in spans]
    rows = PlanRows.of(made)
    shape = StepShape((BatchShape(12, 3, 4, 8, 3), BatchShape(20, 3, 4, 0, 3)))
    buffer = torch.zeros(shape.words, dtype=torch.int32)
    pack_step(rows, shape, StepSpans.of(rows, 3, 5).within(shape), buffer, 5)
    _, batches = packed_batches(shape, buffer, 5)
    queries = torch.full((32, 2, 16), torch.nan, dtype=torch.float16)
    queries[:22] = torch.cat([q[start : start + count] for start, count in spans])
    wanted = []
    for start, count in spans:
        alone = make_batch((PagedSequence(0, count, start, PAGES),), short_tokens=count)
        wanted.append(attend_reference(q[start : start + count], *pages, alone, None))
    parts = zip(queries.split([12, 20]), batches, strict=True)
    got = torch.cat([decode(part, pages, batch, VARIANTS[3]) for part, batch in parts])
    assert_same_bits(got[:22], torch.cat(wanted), "rows of a packed step")


def test_the_order_of_splits_reaches_a_bit():
    """Negative control: pages exchanged (every key seen by the last row) give other bits."""
    q, k, v = sequence_of(768, torch.float32, query_heads=2, key_heads=1)
    pages = pages_of(k, v, 768)
    outs = []
    for mapping in (PAGES, PAGES[::-1]):
        batch = make_batch((PagedSequence(0, 1, 767, mapping),))
        outs.append(decode(q[-1:], pages, batch, VARIANTS[3]))
    if same_bits(*outs):
        raise AssertionError("the order of splits reached no bit: this test shows nothing")


def merge_by(kernel, states, batch, window, sinks=(), **options):
    """What a merge makes of states (largest, mass, total) [splits, key heads, rows (, lanes)]."""
    _, key_heads, rows, lanes = states[2].shape
    out = torch.full((2, key_heads * rows // 2, lanes), torch.nan)
    kernel[(2 * out.shape[1],)](
        out,
        SplitStates(*(x.reshape(-1) for x in states)),
        *sinks,
        batch.short,
        batch.rows,
        window or 0,
        rows,
        batch.short_rows,
        SHAPE=AttentionShape(key_heads, rows // 2, lanes, lanes, window is not None, False),
        enable_fp_fusion=False,
        **options,
    )
    return out


def test_a_merge_of_several_chunks_has_the_bits_of_one_chain():
    """Of two tokens the second alone sees the last of 70 splits: the first's state is NaN there."""
    sequence = PagedSequence(0, 2, 69 * 256 - 1, tuple(range(70)))
    batch = make_batch((sequence,))
    largest = draw(70, 2, 4, seed=1) * 3 + torch.linspace(-6, 6, 70)[:, None, None]
    largest[::7] = largest[3::7][:10]  # some are equal, and others far below
    largest[5] -= 1000
    states = [largest, draw(70, 2, 4, seed=2).abs(), draw(70, 2, 4, 16, seed=3)]
    for x in states:
        x[69, :, :2] = torch.nan
    merge = attention_decode_launch.merge_splits
    plain = {"num_warps": 4, "DEPENDENT": False, "sinks": (torch.empty(0),)}
    for window in (None, 5000, 300):
        wanted = merge_by(decode_reference.merge_splits, states, batch, window, UNROLL=4)
        for chunk in (32, 64, 128):
            got = merge_by(merge, states, batch, window, CHUNK=chunk, **plain)
            assert_same_bits(got, wanted, f"chunks of {chunk}, window {window}")
    turned = [torch.cat([x[:69].flip(0), x[69:]]) for x in states]
    got = merge_by(merge, turned, batch, None, CHUNK=32, **plain)
    wanted = merge_by(decode_reference.merge_splits, states, batch, None, UNROLL=4)
    if same_bits(got, wanted):
        raise AssertionError("the order of states reached no bit: this test shows nothing")


def test_one_launch_rotates_and_stores_the_bits_of_three():
    sequences = (PagedSequence(0, 7, 253, (4, 1)), PagedSequence(7, 2, 30, (3,)))
    host = make_batch(sequences)
    shapes = (5, 2, 64), (4, 4, 96), (3, 1, 16)
    shares = FEW_ROWS, MANY_ROWS, HeadShare(4, 4)
    dtypes = torch.float16, torch.float32
    for shape, share, dtype, normed in pairwise(shapes, shares, dtypes, (False, True)):
        heads, keys, head = shape
        name = f"{dtype} {heads} {keys} {head} {normed} {share}"
        wide = draw(9, (heads + 2 * keys) * head, dtype=dtype, seed=head, spread=True)
        parts = wide.split([heads * head, keys * head, keys * head], 1)
        q, k, v = (x.view(9, -1, head) for x in parts)
        q[1, 1] = 0
        k[2, 0] = torch.inf
        tables = draw(300, head // 2, seed=1), draw(300, head // 2, seed=2)
        norms = tuple(draw(head, dtype=dtype, seed=s) if normed else None for s in (3, 4))
        theirs = [torch.full((6, keys, 256, head), 7.0, dtype=dtype) for _ in "kv"]
        wanted = cpu_rotation.rotate_and_store(q, k, v, tables, norms, 1e-6, theirs, host)
        ours = [torch.full_like(x, 7.0) for x in theirs]
        got = rotate_and_store_as(q, k, v, tables, norms, 1e-6, ours, host, share)
        assert_same_bits(got, wanted, name)
        for left, right in zip(ours, theirs, strict=True):
            left, right = left.nan_to_num(99.0), right.nan_to_num(99.0)
            assert_same_bits(left, right, f"pages {name}")
        angles = [table[host.positions] for table in tables]
        three = rotary.rotate_heads(q, *angles, norms[0], 1e-6)
        assert_same_bits(got, three, f"rotate_heads {name}")
