"""Each CPU kernel gives an element the same bits in any company, shard, chunk and thread count."""

import math
import random

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import ops, order
from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.gemm.admission import check_bit_classes
from tpdet.kernels.cpu.pointwise import embedding, rotary
from tpdet.kernels.inputs.activations import ACTIVATIONS, GELU_CUBIC, GELU_LINEAR
from tpdet.kernels.inputs.gated import gate_and_up, interleaved
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.known import golden
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.kernels.partial_sums import PartialSums, relative_roots, whole_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, dtype=torch.float32, kind="normal", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "heavy":
        x = x * torch.randn(*shape, generator=generator).mul(2).exp()
    if kind == "cancelling":
        x[..., 1::2] = -x[..., 0::2] * (1 + 1e-3)
    if kind == "tiny":
        x = x * 1e-20
    return x.to(dtype)


@pytest.fixture(autouse=True)
def _one_thread():
    threads.configure(1)
    yield
    threads.configure(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "cancelling", "tiny"])
def test_a_column_product_depends_on_neither_rows_nor_shards(dtype, kind):
    x, w = draw(70, 256, dtype=dtype, kind=kind), draw(400, 256, dtype=dtype, kind=kind, seed=1)
    bias = draw(400, dtype=dtype, seed=2)
    whole = ops.column_gemm(x, w, bias)
    for row in (0, 17, 69):
        assert_same_bits(ops.column_gemm(x[row : row + 1], w, bias)[0], whole[row], "one row")
    assert_same_bits(ops.column_gemm(x[5:40], w, bias), whole[5:40], "some rows")
    for shard in (16, 48, 50, 200):
        parts = [
            ops.column_gemm(x, w[n : n + shard].clone(), bias[n : n + shard])
            for n in range(0, 400, shard)
        ]
        assert_same_bits(torch.cat(parts, 1), whole, f"shards of {shard}")


def test_the_plain_product_of_one_row_has_other_bits():
    """Negative control: without fixed 16-row calls the batch would change the answer."""
    x, w = draw(64, 512, kind="heavy"), draw(512, 512, kind="heavy", seed=1)
    assert not same_bits(torch.mm(x[:1], w.t())[0], torch.mm(x, w.t())[0])
    assert same_bits(ops.column_gemm(x[:1], w)[0], ops.column_gemm(x, w)[0])


@pytest.mark.parametrize("count", [2, 3])
def test_the_thread_count_changes_no_bit(count):
    x, w = draw(40, 512), draw(1100, 512, seed=1)
    q, pages, batch = attention_case(torch.float32, 64, 8, 4, 600)
    one = ops.column_gemm(x, w), ops.paged_attention(q, *pages, batch)
    threads.configure(count)
    assert_same_bits(ops.column_gemm(x, w), one[0], "product")
    assert_same_bits(ops.paged_attention(q, *pages, batch), one[1], "attention")


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_no_sequence_names_are_zeros_by_any_threads(count):
    q, pages, _ = attention_case(torch.float32, 64, 8, 4, 600)
    threads.configure(count)
    assert not ops.paged_attention(q, *pages, make_batch(())).any()


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_product_is_equal_over_all_tensor_parallel_sizes(name, dtype):
    leaves, width, n, m = 8, 48, 96, 21
    x, w = draw(m, leaves * width, dtype=dtype), draw(leaves, n, width, dtype=dtype, seed=1)
    totals = []
    for ranks in (1, 2, 4, 8):
        plan, share = order.fold_plan(name, leaves, ranks), leaves // ranks
        sent = []
        for rank in range(ranks):
            mine = slice(rank * share, (rank + 1) * share)
            columns = x[:, rank * share * width : (rank + 1) * share * width]
            roots = relative_roots(plan.roots[rank])
            sent.append(ops.fold_roots(ops.leaf_sums(columns, w[mine].clone(), roots), plan.slots))
        totals.append(ops.fold_final(torch.stack(sent), plan.final))
    for total in totals[1:]:
        assert_same_bits(total, totals[0], name)


def test_the_three_fold_orders_differ_in_bits():
    partials = draw(8, 16, 64, kind="heavy")
    totals = [
        order.evaluate(order.fold_tree(name, 8), lambda i: partials[i], torch.add)
        for name in order.FOLD_ORDERS
    ]
    assert not same_bits(totals[0], totals[1])
    assert not same_bits(totals[1], totals[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
def test_a_norm_depends_on_its_own_row_alone(dtype, kind):
    """Rows of the fp32 stream, normed to every dtype."""
    x, w = draw(33, 200, kind=kind), draw(200, dtype=dtype, seed=1)
    whole = ops.rms_norm(x, Norm(w, 1e-6))
    assert whole.dtype == dtype
    for row in range(33):
        assert_same_bits(ops.rms_norm(x[row : row + 1], Norm(w, 1e-6))[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_does_not_depend_on_the_order_of_its_row(dtype):
    """Nor do rows where a sum in floating point would: every exponent, values that cancel."""
    x, w = draw(6, 512, kind="heavy"), torch.ones(512, dtype=dtype)
    rows = torch.cat([x, golden.hard_rows(x)])
    for seed in range(3):
        mixed = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        found = ops.rms_norm(rows[:, mixed], Norm(w, 1e-6))
        assert_same_bits(found, ops.rms_norm(rows, Norm(w, 1e-6))[:, mixed])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fold_and_norm_keeps_the_stream_in_fp32(dtype):
    """h = total + residual, rounded once; a total may be in dtype."""
    total, residual = draw(5, 96, kind="heavy"), draw(5, 96, seed=1)
    norm = Norm(draw(96, dtype=dtype, seed=3), 1e-6)
    for added in (total, total.clamp(-6e4, 6e4).to(dtype)):
        h, y = ops.fold_and_norm(whole_sum(added), Finish(residual, norm))
        assert_same_bits(h, added.float() + residual, "h")
        assert_same_bits(y, ops.rms_norm(added.float() + residual, norm), "y")
        assert y.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_behind_a_block_is_rounded_and_then_added_to_the_stream(dtype):
    """Also of sums of -0, whose norm is that of +0; without a norm after it, y is h in dtype."""
    total, residual = draw(5, 96, kind="heavy"), draw(5, 96, seed=1)
    total[0], residual[0] = -0.0, -0.0
    norm, behind = (Norm(draw(96, dtype=dtype, seed=seed), 1e-6) for seed in (3, 4))
    wanted = ops.rms_norm(total + 0.0, behind).float() + residual
    assert not same_bits(wanted[:1], ops.rms_norm(total, behind).float()[:1] + residual[:1])
    for following in (norm, None):
        h, y = ops.fold_and_norm(whole_sum(total), Finish(residual, following, behind))
        assert_same_bits(h, wanted, "h")
        assert_same_bits(y, wanted.to(dtype) if following is None else ops.rms_norm(wanted, norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_stream_would_have_other_bits(dtype):
    """Negative control, of the stream and of the norm that reads it."""
    sums, residual = PartialSums(draw(1, 5, 96), (0,)), draw(5, 96, seed=1)
    norm = Norm(draw(96, dtype=dtype, seed=3), 1e-6)
    h, y = ops.fold_and_norm(sums, Finish(residual, norm))
    rounded = h.to(dtype).float()
    assert not same_bits(h, rounded) and not same_bits(y, ops.rms_norm(rounded, norm))


def test_a_stream_past_the_largest_fp16_stays_finite():
    residual = torch.full((1, 64), 60_000.0)
    sums, norm = PartialSums(residual[None].clone(), (0,)), Norm(torch.ones(64).half(), 1e-6)
    h, y = ops.fold_and_norm(sums, Finish(residual, norm))
    assert h.amax() == 120_000 and torch.equal(y, torch.ones(1, 64).half())
    assert ops.rms_norm(h.half().float(), norm).isnan().all()


def test_a_layer_norm_is_torchs_and_knows_no_order():
    x, weight = draw(9, 300, kind="heavy") + 3.0, draw(2, 300, seed=1)
    found = ops.rms_norm(x, Norm(weight, 1e-5, "layer"))
    wanted = torch.nn.functional.layer_norm(x.double(), (300,), *weight.double(), 1e-5)
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    turned = ops.rms_norm(x[:, order], Norm(weight[:, order], 1e-5, "layer"))
    assert_same_bits(turned, found[:, order].contiguous())
    bad = torch.full((2, 300), 1.0)
    bad[0, 3], bad[1, 4] = torch.inf, torch.nan
    assert ops.rms_norm(bad, Norm(weight, 1e-5, "layer")).isnan().all()


def test_a_norm_of_zeros_is_zero_and_of_nan_is_nan():
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    y = ops.rms_norm(x, Norm(torch.ones(64), 1e-6))
    assert torch.equal(y[0], torch.zeros(64))
    assert torch.isnan(y[1]).all() and torch.isnan(y[2]).all()


@pytest.mark.parametrize("width", [8, 16, 96])
def test_activations_give_a_slice_the_bits_of_the_whole(width):
    gate_up = draw(7, 2 * 128)
    for name in ACTIVATIONS:
        whole = ops.activate_and_multiply(gate_up, activation=name)
        part = ops.activate_and_multiply(gate_up[:, 16 : 16 + 2 * width], activation=name)
        assert_same_bits(part, whole[:, 8 : 8 + width].contiguous(), name)


def test_activations_have_the_values_of_torch():
    gate, up = draw(64, 24, kind="heavy"), draw(64, 24, seed=1)
    gate[:6, 0] = torch.tensor([0.0, -0.0, -2e19, 2e19, -9.4, 1e-30])
    rows = interleaved(gate.t(), up.t()).t().contiguous()
    silu, gelu = (ops.activate_and_multiply(rows, activation=name) for name in ACTIVATIONS)
    gate, up = gate.double(), up.double()
    for found, wanted in (
        (silu, torch.nn.functional.silu(gate)),
        (gelu, torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        assert ((found - wanted * up).abs() <= 1e-6 * (1 + (wanted * up).abs())).all()
    constants = 2 * (2 / math.pi) ** 0.5, 0.044715 * 2 * (2 / math.pi) ** 0.5
    assert tuple(torch.tensor(constants).tolist()) == (GELU_LINEAR, GELU_CUBIC)


def test_eights_of_gates_and_ups_lie_in_turn():
    gate, up = torch.arange(24), 100 + torch.arange(24)
    rows = interleaved(gate, up)
    assert rows.tolist() == [
        value for g in (0, 8, 16) for first in (g, 100 + g) for value in range(first, first + 8)
    ]
    for part, wanted in zip(gate_and_up(rows[None]), (gate, up), strict=True):
        assert torch.equal(part[0], wanted)
    gate, up = draw(80, 48), draw(80, 48, seed=1)
    for part, wanted in zip(gate_and_up(interleaved(gate, up).t()), (gate, up), strict=True):
        assert_same_bits(part.contiguous(), wanted.t().contiguous())


@pytest.mark.parametrize("ranks", [2, 5, 10])
def test_a_ranks_interleaved_rows_are_a_slice_of_the_wholes(ranks):
    """And its product is the same columns of the whole's, whatever the number of ranks."""
    gate, up = draw(160, 64), draw(160, 64, seed=1)
    weight, x = interleaved(gate, up), draw(9, 64, seed=2)
    whole, share = ops.gated_gemm(x, weight), 160 // ranks
    parts = []
    for rank in range(ranks):
        mine = slice(rank * share, (rank + 1) * share)
        part = interleaved(gate[mine], up[mine])
        assert_same_bits(part, weight[2 * mine.start : 2 * mine.stop])
        parts.append(ops.gated_gemm(x, part))
    assert_same_bits(torch.cat(parts, 1), whole, f"{ranks} ranks")


@pytest.mark.parametrize(("gate", "up"), [(12, 12), (16, 24), (4, 4)])
def test_rows_that_are_no_eights_are_refused(gate, up):
    with pytest.raises(ValueError, match="a multiple of 8"):
        interleaved(torch.zeros(gate, 4), torch.zeros(up, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "cancelling"])
@pytest.mark.parametrize("width", [48, 1184, 1440])  # 96, 2,368 and 2,880 rows
def test_a_gated_product_is_the_formula_over_fp32_sums(dtype, kind, width):
    x, gate = draw(7, 64, dtype=dtype, kind=kind), draw(width, 64, dtype=dtype, seed=1)
    up = draw(width, 64, dtype=dtype, seed=2)
    whole = ops.gated_gemm(x, interleaved(gate, up))
    g, u = (ops.column_gemm(x, part, out_dtype=torch.float32) for part in (gate, up))
    assert g.dtype == torch.float32
    assert_same_bits(whole, (g / (1.0 + torch.exp(-g)) * u).to(dtype))
    for row in (0, 6):
        assert_same_bits(ops.gated_gemm(x[row : row + 1], interleaved(gate, up))[0], whole[row])
    if dtype != torch.float32:  # negative control: the gates alone, then both
        for rounded in ((g.to(dtype).float(), u), (g.to(dtype).float(), u.to(dtype).float())):
            g, u = rounded
            assert not same_bits((g / (1.0 + torch.exp(-g)) * u).to(dtype), whole)


def test_rotated_heads_do_not_depend_on_how_many_heads_there_are():
    x, w = draw(9, 8, 64), draw(64, seed=1)
    cos, sin = draw(9, 32, seed=2), draw(9, 32, seed=3)
    whole = rotary.rotate_heads(x, cos, sin, w, 1e-6)
    for head in range(8):
        one = rotary.rotate_heads(x[:, head : head + 1].clone(), cos, sin, w, 1e-6)
        assert_same_bits(one[:, 0], whole[:, head].contiguous())


def attention_case(dtype, head, query_heads, key_heads, length, poison=True):
    """q, (k pages, v pages) and a batch of one whole prompt; unwritten slots hold NaN."""
    k = draw(length, key_heads, head, dtype=dtype, seed=1)
    v = draw(length, key_heads, head, dtype=dtype, seed=2)
    q = draw(length, query_heads, head, dtype=dtype, seed=3) * 2
    count = -(-length // PAGE_TOKENS)
    shape = (count + 3, key_heads, PAGE_TOKENS, head)
    pages = [torch.full(shape, torch.nan if poison else 0.0, dtype=dtype) for _ in "kv"]
    mapping = tuple(random.Random(length).sample(range(count + 3), count))
    batch = make_batch((PagedSequence(0, length, 0, mapping),))
    embedding.store_kv(k, v, *pages, batch)
    return q, pages, batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head", "query_heads", "key_heads", "window", "sinks"),
    [
        (64, 8, 8, None, False), (64, 8, 2, 300, False), (64, 8, 2, 77, True),
        (96, 6, 2, None, True), (128, 8, 1, 77, False), (256, 2, 2, None, False),
    ],
)  # fmt: skip
def test_attention_is_equal_whole_chunked_and_decoded(
    dtype, head, query_heads, key_heads, window, sinks
):
    length = 560
    q, pages, batch = attention_case(dtype, head, query_heads, key_heads, length)
    sink = draw(query_heads, seed=4) * 3 if sinks else None
    whole = ops.paged_attention(q, *pages, batch, window, 0.0, sink)
    assert torch.isfinite(whole).all()
    mapping, done, chance = batch.sequences[0].pages, 0, random.Random(7)
    while done < length:
        count = min(chance.choice((1, 1, 3, 16, 64, 130, 256)), length - done)
        chunk = make_batch((PagedSequence(0, count, done, mapping),))
        part = ops.paged_attention(q[done : done + count], *pages, chunk, window, 0.0, sink)
        assert_same_bits(part, whole[done : done + count], f"chunk at {done}")
        done += count
    rows = list(range(0, length, 13))
    crowd = make_batch(tuple(PagedSequence(i, 1, r, mapping) for i, r in enumerate(rows)))
    together = ops.paged_attention(q[rows], *pages, crowd, window, 0.0, sink)
    assert_same_bits(together, whole[rows], "decoded together")


def test_attention_heads_do_not_depend_on_how_many_heads_a_rank_holds():
    q, pages, batch = attention_case(torch.float32, 64, 8, 4, 300)
    whole = ops.paged_attention(q, *pages, batch)
    for rank in range(8):
        mine = [p[:, rank // 2 : rank // 2 + 1].clone() for p in pages]
        one = ops.paged_attention(q[:, rank : rank + 1].clone(), *mine, batch)
        assert_same_bits(one[:, 0], whole[:, rank].contiguous(), f"head {rank}")


def test_what_unwritten_slots_hold_changes_nothing():
    clean = attention_case(torch.float32, 64, 4, 2, 300, poison=False)
    poisoned = attention_case(torch.float32, 64, 4, 2, 300, poison=True)
    results = [ops.paged_attention(q, *pages, s) for q, pages, s in (clean, poisoned)]
    assert_same_bits(*results, "poisoned pages")


def test_online_softmax_over_the_whole_row_is_another_function():
    """Negative control: splits counted from the sequence's end would change with its length."""
    q, pages, batch = attention_case(torch.float32, 64, 1, 1, 512)
    keys = torch.cat([pages[0][p, 0] for p in batch.sequences[0].pages])
    values = torch.cat([pages[1][p, 0] for p in batch.sequences[0].pages])
    whole = torch.softmax(q[511] @ keys.t() / 8, -1) @ values
    ours = ops.paged_attention(q, *pages, batch)[511]
    assert (whole - ours).abs().max() < 1e-4 and not same_bits(whole, ours)


def test_an_unknown_norm_is_refused_by_its_name():
    with pytest.raises(ValueError, match="norm 'batch': use one of rms"):
        Norm(torch.ones(4), 1e-6, "batch")


def test_a_device_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        ops.rms_norm(torch.empty(1, 16, device="meta"), Norm(torch.ones(16), 1e-6))


def test_the_bit_classes_hold_on_this_machine():
    check_bit_classes([64, 176, 512, 4096], 64)


@pytest.mark.parametrize("height", [40, 256, 300, 1000])
def test_a_shard_has_its_bits_where_narrow_blocks_are_another_class(monkeypatch, height):
    real, widths = torch.mm, set()

    def narrow_is_other(x, w):
        widths.add(w.shape[1])
        return real(x, w) if w.shape[1] == 256 else real(x, w) * 1.5

    x, weight = torch.randn(17, 64), torch.randn(1024, 64)
    whole = ops.column_gemm(x, weight, None, torch.float32)
    monkeypatch.setattr(torch, "mm", narrow_is_other)
    for first in (0, 24):
        part = ops.column_gemm(x, weight[first : first + height], None, torch.float32)
        assert same_bits(part, whole[:, first : first + height])
    assert widths == {256}


def test_a_blas_that_leaves_its_class_is_refused(monkeypatch):
    real = torch.mm

    def split_k(x, w):
        if x.shape[0] < 64:
            return real(x, w)
        cut = 137  # no block of K of any BLAS, which may split it itself
        return real(x[:, :cut], w[:cut]) + real(x[:, cut:], w[cut:])

    monkeypatch.setattr(torch, "mm", split_k)
    with pytest.raises(RuntimeError, match="other bits for 64 rows and columns from 0 on"):
        check_bit_classes([512], 64)
