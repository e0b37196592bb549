"""The GPU's attention-side kernels in Triton's interpreter, their sums in an exact order.

fp16 and fp32: bf16 is wrong in the interpreter.
"""

import random

import torch

from tests.kernels.interpreted.paged_inputs import (
    LONG,
    PAGES,
    SHORT,
    attend,
    pages_of,
    sequence_of,
)
from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels.cpu.attention import attention as cpu_attention
from tpdet.kernels.cpu.pointwise import embedding as cpu_embedding
from tpdet.kernels.cpu.pointwise import rotary as cpu_rotary
from tpdet.kernels.cpu.pointwise import soft_cap as cpu_cap
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.pointwise import embedding, rotary
from tpdet.kernels.cuda.pointwise import soft_cap as gpu_cap
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

PREFILL = (
    AttentionVariant(16, 4, 1),
    AttentionVariant(64, 4, 1),
    AttentionVariant(128, 8, 1),
    AttentionVariant(64, 4, 1, True),
)
DECODE = AttentionVariant(16, 4, 1), AttentionVariant(64, 4, 1)


def test_every_variant_chunk_and_phase_is_one_bit_class():
    for dtype, window in ((torch.float16, None), (torch.float32, 77)):
        length = 530
        q, k, v = sequence_of(length, dtype, query_heads=2, key_heads=1)
        pages = pages_of(k, v, length)
        whole = attend(q, pages, 0, LONG, PREFILL[1], window)
        batch = make_batch((PagedSequence(0, length, 0, PAGES),))
        near = cpu_attention.paged_attention(q, *pages, batch, window).double()
        error = float((whole.double() - near).norm() / near.norm())
        if not error < {torch.float16: 1e-3, torch.float32: 1e-6}[dtype]:
            raise AssertionError(f"{dtype}: relative error {error} against the CPU's attention")
        for variant in PREFILL:
            got = attend(q[490:], pages, 490, LONG, variant, window)
            assert_same_bits(got, whole[490:], f"{dtype} {window} {variant}")
        for variant in DECODE:
            got = attend(q[-20:], pages, length - 20, SHORT, variant, window)
            assert_same_bits(got, whole[-20:], f"{dtype} {window} splits {variant}")


def test_capped_scores_are_one_bit_class_too():
    length, cap = 300, 2.0
    q, k, v = sequence_of(length, torch.float16, query_heads=2, key_heads=1)
    pages = pages_of(k, v, length)
    whole = attend(q[280:], pages, 280, LONG, PREFILL[1], cap=cap)
    assert not same_bits(whole, attend(q[280:], pages, 280, LONG, PREFILL[1]))
    batch = make_batch((PagedSequence(0, length, 0, PAGES),))
    near = cpu_attention.paged_attention(q, *pages, batch, None, cap)[280:].double()
    assert (whole.double() - near).norm() <= 1e-3 * near.norm()
    assert_same_bits(attend(q[280:], pages, 280, LONG, PREFILL[3], cap=cap), whole, "prefill")
    for variant in (DECODE[0], AttentionVariant(16, 4, 1, fused=True, swapped=True)):
        got = attend(q[-2:], pages, length - 2, SHORT, variant, cap=cap)
        assert_same_bits(got, whole[-2:], f"{variant}")


def test_sinks_are_one_bit_class_too():
    """Prefill, decode and drafts, split by split or fused, and layers that skip the first split."""
    length, sinks = 520, torch.tensor([2.5, -0.75])
    q, k, v = sequence_of(length, torch.float16, query_heads=2, key_heads=1)
    pages, batch = pages_of(k, v, length), make_batch((PagedSequence(0, length, 0, PAGES),))
    tried = (
        AttentionVariant(16, 4, 1),
        *(AttentionVariant(16, 4, 1, fused=f, swapped=True) for f in (False, True)),
    )
    for window in (None, 77):
        whole = attend(q[490:], pages, 490, LONG, PREFILL[1], window, sinks=sinks)
        near = cpu_attention.paged_attention(q, *pages, batch, window, 0.0, sinks)[490:].double()
        assert (whole.double() - near).norm() <= 1e-3 * near.norm()
        got = attend(q[490:], pages, 490, LONG, PREFILL[3], window, sinks=sinks)
        assert_same_bits(got, whole, f"prefill {window}")
        for variant in tried:
            for first in (504, 519):
                got = attend(q[first:], pages, first, SHORT, variant, window, sinks=sinks)
                assert_same_bits(got, whole[first - 490 :], f"{window} {variant} {first}")
        for other in (None, sinks.flip(0)):
            moved = attend(q[519:], pages, 519, SHORT, tried[0], window, sinks=other)
            assert not same_bits(moved[0, 0], whole[-1, 0]), "the sink reached no bit"
    few = pages_of(k, v, 9)
    alone = attend(q[8:9], few, 8, LONG, PREFILL[1], sinks=sinks)
    for variant in tried:
        assert_same_bits(attend(q[8:9], few, 8, SHORT, variant, sinks=sinks), alone, f"{variant}")


def test_soft_caps_are_those_of_torch_to_an_ulp_of_the_cap():
    x = torch.cat([draw(1000) * 40, torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf])])
    wanted = 30 * (x.double() / 30).tanh()
    for found in (gpu_cap.soft_cap(x.clone(), 30.0), cpu_cap.soft_cap(x, 30.0)):
        assert (found - wanted).abs().amax() <= 8e-6
        assert found[-4:].tolist() == [30.0, -30.0, 30.0, -30.0]
    assert gpu_cap.soft_cap(torch.tensor([torch.nan, 1.0]), 30.0).isnan().tolist() == [True, False]
    assert cpu_cap.soft_cap(torch.tensor([torch.nan, 1.0]), 30.0).isnan().tolist() == [True, False]


def test_what_follows_a_row_changes_nothing():
    q, k, v = sequence_of(530, torch.float16, query_heads=2, key_heads=1)
    whole = attend(q, pages_of(k, v, 530), 0, LONG, PREFILL[2])
    for length in (1, 63, 65, 256, 257, 513):
        pages = pages_of(k, v, length)
        one = attend(q[length - 1 : length], pages, length - 1, SHORT, DECODE[0])
        assert_same_bits(one[0], whole[length - 1], f"decode at {length}")
        last = min(length, 40)
        part = attend(q[length - last : length], pages, length - last, LONG, PREFILL[3])
        assert_same_bits(part, whole[length - last : length], f"chunk up to {length}")


def test_a_mixed_batch_gives_each_sequence_its_own_bits():
    chance, spans = random.Random(5), ((0, 30), (299, 300), (260, 265), (240, 280), (0, 1))
    numbers = chance.sample(range(12), 9)
    pages = [torch.full((12, 2, 256, 16), torch.nan, dtype=torch.float16) for _ in "kv"]
    sequences, queries, alone, row = [], [], [], 0
    for index, (first, end) in enumerate(spans):
        q, k, v = (x[:end] for x in sequence_of(300 + index, torch.float16))
        mapping = tuple(numbers.pop() for _ in range(-(-end // 256)))
        stored = make_batch((PagedSequence(0, end, 0, mapping),))
        embedding.store_kv(k, v, *pages, stored)
        alone.append(attend(q[first:], pages_of(k, v, end), first, LONG, PREFILL[1]))
        queries.append(q[first:])
        sequences.append(PagedSequence(row, end - first, first, mapping))
        row += end - first
    pad = torch.full((3, 4, 16), torch.nan, dtype=torch.float16)
    for short in (16, SHORT):
        batch = make_batch(tuple(sequences), short_tokens=short)
        q = torch.cat([*queries, pad])
        out = attention.attend(q, *pages, batch, None, PREFILL[1], DECODE[0])
        assert_same_bits(out, torch.cat([*alone, torch.zeros_like(pad)]), f"short {short}")


def test_heads_of_a_rank_keep_their_bits():
    q, k, v = sequence_of(280, torch.float16, head=96, query_heads=6)
    pages = pages_of(k, v, 280)
    whole = attend(q[250:], pages, 250, LONG, PREFILL[1])
    for heads, key in ((slice(3, 6), 1), (slice(2, 3), 0)):
        mine = [x[:, key : key + 1].contiguous() for x in pages]
        for short in (LONG, SHORT):
            part = attend(q[250:, heads].contiguous(), mine, 250, short, PREFILL[0])
            assert_same_bits(part, whole[:, heads], f"heads {heads} short {short}")


def test_an_online_softmax_without_splits_is_another_function():
    """Negative control: splits that began elsewhere would give other bits."""
    q, k, v = sequence_of(400, torch.float32, query_heads=2, key_heads=1)
    whole = attend(q[-1:], pages_of(k, v, 400), 399, LONG, PREFILL[0])
    moved = attend(q[-1:], pages_of(k[100:], v[100:], 300), 299, LONG, PREFILL[0])
    swapped = attend(q[-1:], pages_of(k.flip(0), v.flip(0), 400), 399, LONG, PREFILL[0])
    if same_bits(whole, swapped) or same_bits(whole, moved):
        raise AssertionError("the order of the keys reached no bit: this test shows nothing")


def test_rotated_heads_have_the_bits_of_the_cpu():
    for dtype in (torch.float16, torch.float32):
        for head in (64, 96):
            wide = draw(9, 3 * head + 16, dtype=dtype, seed=head, spread=True)
            x = wide[:, : 3 * head].view(9, 3, head)
            x[1, 1] = 0
            if dtype == torch.float32:
                x[2] *= 1e-38
                x[3, :, 0] = 1e30
            cos, sin = draw(9, head // 2, seed=1), draw(9, head // 2, seed=2)
            for weight in (None, draw(head, dtype=dtype, seed=3)):
                got = rotary.rotate_heads(x, cos, sin, weight, 1e-6)
                wanted = cpu_rotary.rotate_heads(x, cos, sin, weight, 1e-6)
                assert_same_bits(got, wanted, f"{dtype} {head} {weight is not None}")


def test_embedded_rows_are_the_table_s_in_fp32():
    for dtype, width in ((torch.float16, 96), (torch.float32, 33)):
        table, ids = draw(20, width, dtype=dtype), torch.tensor([0, 19, 7, 7])
        assert_same_bits(embedding.embed(ids, table), table[ids].float())
        for module in (embedding, cpu_embedding):
            beyond = module.embed(torch.tensor([-1, 20]), table)
            assert_same_bits(beyond, table[[0, 19]].float())


def test_stored_rows_have_the_bits_of_the_cpu():
    k, v = draw(300, 3, 16, dtype=torch.float16), draw(300, 3, 16, dtype=torch.float16, seed=1)
    sequences = (PagedSequence(0, 290, 100, (4, 1)), PagedSequence(290, 1, 255, (3,)))
    shape = (6, 3, 256, 16)
    ours = [torch.full(shape, torch.nan, dtype=torch.float16) for _ in "kv"]
    theirs = [torch.full(shape, torch.nan, dtype=torch.float16) for _ in "kv"]
    embedding.store_kv(k, v, *ours, make_batch(sequences))
    cpu_embedding.store_kv(k, v, *theirs, make_batch(sequences))
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right, "pages")
