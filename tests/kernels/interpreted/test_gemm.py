"""The GPU's GEMM-side kernels in Triton's interpreter, their sums in an exact order."""

import pytest
import torch

from tests.kernels.product_inputs import chain, draw
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.some_slow import some_slow
from tpdet.kernels import order
from tpdet.kernels.cpu.gemm import gated as cpu_gated
from tpdet.kernels.cpu.pointwise import finish as cpu_finish
from tpdet.kernels.cpu.pointwise import fold as cpu_fold
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm import gated as gated_gemm
from tpdet.kernels.cuda.gemm.choice.variants import FOLDS, variant_of
from tpdet.kernels.cuda.gemm.operands import run_chain
from tpdet.kernels.cuda.gemm.variants import leaf_fold as gemm_fold
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.cuda.hardware import NO_GPU
from tpdet.kernels.cuda.pointwise import activation, finish, fold, norm
from tpdet.kernels.inputs.activations import ACTIVATIONS
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.known import golden
from tpdet.kernels.partial_sums import whole_sum

SMALL = (
    Tile(16, 64, 32, 4, 3, "pointer_swapped"),
    Tile(16, 16, 16, 4, 3),
    Tile(64, 32, 32, 4, 3),
    Tile(32, 32, 32, 4, 3, "descriptor"),
    Tile(64, 32, 16, 4, 3, "descriptor", halves=2),
)

REFERENCE = Tile(16, 16, 16, 4, 3)


def test_every_tile_is_one_bit_class():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, w = draw(37, 3 * 64, dtype=dtype), draw(3, 80, 64, dtype=dtype, seed=1, spread=True)
        bias = draw(80, dtype=dtype, seed=2)
        wanted = chain(x, w, SMALL[0])
        rounded = chain(x[:, :64], w[:1], SMALL[0], bias, dtype)
        for variant in SMALL[1:]:
            assert_same_bits(chain(x, w, variant), wanted, f"{dtype} {variant}")
            got = chain(x[:, :64], w[:1], variant, bias, dtype)
            assert_same_bits(got, rounded, f"bias {dtype} {variant}")


def test_rows_and_shards_keep_their_bits():
    x, w = draw(37, 64, dtype=torch.float16), draw(1, 80, 64, dtype=torch.float16, seed=1)
    whole = chain(x, w, SMALL[3])
    for row in (0, 16, 36):
        assert_same_bits(chain(x[row : row + 1], w, SMALL[0])[0, 0], whole[0, row], "row")
    parts = [chain(x, w[:, n : n + 16].contiguous(), SMALL[0]) for n in range(0, 80, 16)]
    assert_same_bits(torch.cat(parts, 2), whole, "shards")


def test_poison_beside_a_leaf_and_under_the_rows_changes_nothing():
    """Rows of one leaf are not those of the next; a NaN row stays in its row."""
    x, w = draw(20, 2 * 48, dtype=torch.float16), draw(2, 48, 48, dtype=torch.float16, seed=1)
    for variant in SMALL:
        variant = variant.at(48)
        clean = chain(x, w, variant)
        bad_x, bad_w = x.clone(), w.clone()
        bad_x[7], bad_x[:, 48:], bad_w[1] = torch.nan, torch.nan, torch.nan
        dirty = chain(bad_x, bad_w, variant)
        keep = [row for row in range(20) if row != 7]
        assert_same_bits(dirty[0, keep], clean[0, keep], f"{variant}")


def fold_case(name, leaves, ranks, variant):
    x = draw(21, leaves * 32, dtype=torch.float16, spread=True)
    w = draw(leaves, 48, 32, dtype=torch.float16, seed=1)
    plan, share = order.fold_plan(name, leaves, ranks), leaves // ranks
    sent = []
    for rank, roots in enumerate(plan.roots):
        mine = slice(rank * share, (rank + 1) * share)
        columns = x[:, rank * share * 32 : (rank + 1) * share * 32].contiguous()
        partials = chain(columns, w[mine].contiguous(), SMALL[0])
        wanted = cpu_fold.fold_roots(partials, rank * share, roots, plan.slots)
        got = fold.fold_roots(partials, rank * share, roots, plan.slots)
        assert_same_bits(got, wanted, f"fold_roots {name} {ranks}")
        form = root_form(rank * share, share, roots)
        for kernel in ("flat", "nested"):
            if FOLDS[kernel].fits(form, 32, variant, NO_GPU):
                y = torch.zeros(plan.slots, 21, 48)
                operands = Operands(columns, w[mine].contiguous(), None, y)
                FOLDS[kernel].run(operands, form, variant, 3)
                assert_same_bits(y, wanted, f"run_fold {name} {ranks} {form} {kernel}")
        sent.append(got)
    gathered = torch.stack(sent)
    total = fold.fold_final(gathered, plan.final)
    assert_same_bits(total, cpu_fold.fold_final(gathered, plan.final), f"final {name} {ranks}")
    return total


def test_leaves_fold_to_the_same_bits_at_every_tensor_parallel_size():
    totals = {}
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4, 8):
            variant = Tile(32, 32 if ranks == 2 else 16, 16, 4, 3, "descriptor")
            total = fold_case(name, 8, ranks, variant)
            assert_same_bits(total, totals.setdefault(name, total), f"{name} {ranks}")
    assert not same_bits(totals["sequential"], totals["pairs"])


def test_a_fold_keeps_minus_zero():
    x, w = torch.full((1, 64), -1e-30), torch.full((2, 16, 32), 1e-30)
    y = torch.zeros(1, 1, 16)
    form = root_form(0, 2, ((0, 1),))
    gemm_fold.run_flat(Operands(x, w, None, y), form, Tile(32, 16, 16, 4, 3, "descriptor"), 1)
    partials = chain(x, w, SMALL[1])
    assert_same_bits(y, cpu_fold.fold_roots(partials, 0, ((0, 1),), 1), "fold")
    partials = torch.full((2, 1, 16), -0.0)
    assert_same_bits(fold.fold_roots(partials, 0, ((0, 1),), 1)[0], partials[0], "-0.0")


def test_sixteen_leaves_fold():
    partials = draw(16, 5, 48, spread=True)
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4):
            plan = order.fold_plan(name, 16, ranks)
            for rank, roots in enumerate(plan.roots):
                first = rank * 16 // ranks
                mine = partials[first : first + 16 // ranks].contiguous()
                wanted = cpu_fold.fold_roots(mine, first, roots, plan.slots)
                got = fold.fold_roots(mine, first, roots, plan.slots)
                assert_same_bits(got, wanted, f"{name} {ranks} {rank}")


def test_a_depth_that_does_not_divide_k_is_refused(monkeypatch):
    monkeypatch.setattr(gemm, "descriptor_sms", lambda *_: 0)
    x, w = draw(3, 48), draw(16, 48)
    assert_same_bits(gemm.column_gemm(x, w, None, x.dtype), chain(x, w[None], SMALL[1])[0], "table")
    for bad in (
        lambda: gemm.column_gemm(x, w, None, x.dtype, SMALL[0]),
        lambda: gemm.column_gemm(x[:, :40], w[:, :40], None, x.dtype),
        lambda: gemm.column_gemm(x, w.half(), None, x.dtype),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_head_of_few_labels_has_the_bits_of_wider_products(dtype):
    x, w = draw(70, 64, dtype=dtype), draw(32, 64, dtype=dtype, seed=1)
    wide = chain(x, w[None], SMALL[1])[0]
    for rows in (1, 37, 70):
        for labels in (1, 3, 4):
            head = w[:labels].contiguous()
            found = gemm.column_gemm(x[:rows], head, None, torch.float32)
            assert_same_bits(found, wide[:rows, :labels], f"{rows} {labels}")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_norms_have_the_bits_of_the_cpu():
    """Of rows of an fp32 stream, to every dtype; total: a fold's in fp32, or a product rounded."""
    for dtype in DTYPES:
        for size in (64, 200, 1024):
            x = draw(5, size, spread=True)
            x[1], x[2], x[3] = 0.0, x[2] * 1e-5, x[3] * 1e-42
            w = draw(size, dtype=dtype, seed=1)
            wanted = cpu_norm.rms_norm(x, Norm(w, 1e-6))
            assert wanted.dtype == dtype
            assert_same_bits(norm.rms_norm(x, Norm(w, 1e-6)), wanted, f"{dtype} {size}")
            total = draw(5, size, seed=2)
            for added in (total, total.to(dtype)):
                h, y = finish.fold_and_norm(whole_sum(added), Finish(x, Norm(w, 1e-6)))
                assert_same_bits(h, added.float() + x, "fused residual")
                assert_same_bits(y, cpu_norm.rms_norm(h, Norm(w, 1e-6)), "fused norm")
    x = draw(2, 64)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    assert norm.rms_norm(x, Norm(torch.ones(64), 1e-6)).isnan().all()


def test_parts_of_rows_have_the_norm_of_the_cpu():
    """The three stages of a norm whose rows lie on several ranks; parts of a wider product."""
    rows = draw(6, 300, spread=True)
    for dtype in DTYPES:
        hard = golden.hard_rows(rows) if dtype == torch.float32 else rows.to(dtype)
        part, count = hard[:, 40:240], 300
        weight = Norm(draw(200, dtype=dtype, seed=1), 1e-6)
        largest = cpu_norm.row_largest(part)
        assert_same_bits(norm.row_largest(part), largest, f"largest {dtype}")
        above = torch.maximum(largest, cpu_norm.row_largest(hard))
        mass = cpu_norm.row_mass(part, above)
        assert_same_bits(norm.row_mass(part, above), mass, f"mass {dtype}")
        wanted = cpu_norm.norm_by_mass(part, above, mass, count, weight)
        found = norm.norm_by_mass(part, above, mass, count, weight)
        assert_same_bits(found, wanted, f"norm {dtype}")
    bad = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    found = norm.row_largest(bad)
    assert found[0].isnan() and found[1].isinf()
    ones = Norm(torch.ones(2), 1e-6)
    assert norm.norm_by_mass(bad, found, norm.row_mass(bad, found), 2, ones).isnan().all()
    assert not norm.row_largest(bad[:, :0]).any()


def test_hard_rows_of_the_stream_have_the_bits_of_the_cpu():
    """Those of the golden vectors: subnormals, 3e38, 2^127, all exponents, cancellation, zeros."""
    for size, kind in ((256, "rms"), (300, "rms"), (300, "layer")):
        x = draw(6, size, spread=True)
        hard = golden.hard_rows(x)
        assert hard.abs().amax() > 2.0**127 and (hard[0] != 0).all() and hard[0].amax() < 2.0**-126
        total = hard.flip(0)
        for dtype in DTYPES:
            shape = (2, size) if kind == "layer" else (size,)
            weight = Norm(draw(*shape, dtype=dtype, seed=1), 1e-6, kind)
            wanted = cpu_norm.rms_norm(hard, weight)
            assert_same_bits(norm.rms_norm(hard, weight), wanted, f"hard rows to {dtype}")
            sums, behind = whole_sum(total), Norm(weight.weight.flip(-1), 1e-6, kind)
            for norms in ((weight, None), (weight, behind), (None, behind)):
                given = sums, Finish(hard, *norms)
                results = zip(
                    cpu_finish.fold_and_norm(*given), finish.fold_and_norm(*given), strict=True
                )
                for of_cpu, ours in results:
                    assert_same_bits(ours, of_cpu, f"hard rows and their reverse, {dtype}")


def test_a_stream_beyond_fp16_stays_finite():
    """What fp16 cannot hold is an infinity in a rounded stream, and its norm NaN; not in fp32."""
    residual, total = torch.full((2, 64), 60_000.0), draw(2, 64, seed=3) + 30_000.0
    weight = Norm(draw(64, dtype=torch.float16, seed=1), 1e-6)
    h, y = finish.fold_and_norm(whole_sum(total.half()), Finish(residual, weight))
    assert h.amin() > 65_504 and y.isfinite().all() and y.dtype == torch.float16
    assert_same_bits(h, total.half().float() + residual)
    assert norm.rms_norm(h.half().float(), weight).isnan().all()  # negative control


def test_a_rounded_stream_has_other_bits():
    """Negative control: the norm reads what was never rounded to the model's dtype."""
    residual, total = draw(3, 200), draw(3, 200, seed=1)
    weight = Norm(draw(200, dtype=torch.bfloat16, seed=2), 1e-6)
    h, y = finish.fold_and_norm(whole_sum(total), Finish(residual, weight))
    rounded = h.bfloat16().float()
    assert not same_bits(rounded, h) and not same_bits(norm.rms_norm(rounded, weight), y)


def test_silu_gives_a_slice_the_bits_of_the_whole():
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = draw(3, 1104), draw(3, 1104, seed=1)
        gate[0, :4] = torch.tensor([0.0, -0.0, -200.0, 200.0])
        gate, up = gate.to(dtype), up.to(dtype)
        rows = interleaved(gate.t(), up.t()).t().contiguous()
        whole = activation.activate_and_multiply(rows, torch.float32)
        part = activation.activate_and_multiply(rows[:, 16:224], torch.float32)  # rows apart
        assert_same_bits(part, whole[:, 8:112].contiguous(), "slice")
        exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
        assert ((whole - exact).abs() <= 1e-6 * exact.abs() + 1e-30).all()
        for out in (torch.bfloat16, torch.float16):
            narrow = activation.activate_and_multiply(rows, out)
            assert_same_bits(narrow, whole.to(out), f"{dtype} to {out}, one rounding")


GATED = (
    Tile(16, 64, 32, 4, 3, "pointer_swapped"),
    Tile(8, 16, 32, 4, 3, "pointer_swapped"),
    Tile(16, 16, 16, 4, 3),
    Tile(64, 32, 32, 4, 3),
    Tile(32, 64, 32, 4, 3, "descriptor"),
    Tile(64, 32, 16, 4, 3, "descriptor", halves=2),
    Tile(16, 64, 16, 4, 6, "descriptor_swapped"),
)


def gated(x, w, tile, number=1):
    y = torch.full((1, x.shape[0], w.shape[0] // 2), torch.nan, dtype=x.dtype)
    run_chain(Operands(x, w[None], None, y, gated=number), tile.at(x.shape[1]), 3)
    return y[0]


@pytest.mark.parametrize(
    ("n", "k", "m"),
    some_slow(
        [(96, 64, 21), (144, 48, 3)], [(96, 64, 21), (144, 48, 3), (2368, 32, 5), (2880, 16, 2)]
    ),
)
def test_gated_tiles_are_the_activation_of_the_unrounded_product(n, k, m):
    """Every variant, by shards whose columns its tiles do not divide."""
    for dtype in (torch.bfloat16, torch.float32)[: 2 if n < 1000 else 1]:
        x, w = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1, spread=True)
        wide = chain(x, w[None], REFERENCE)[0]
        wanted = activation.activate_and_multiply(wide, dtype)
        for tile in GATED if n < 1000 else GATED[::2]:
            if dtype != torch.float32 or not variant_of(tile).descriptors:
                assert_same_bits(gated(x, w, tile), wanted, f"{n} {k} {m} {dtype} {tile}")
        rounded = activation.activate_and_multiply(wide.to(dtype), dtype)
        assert dtype == torch.float32 or not same_bits(rounded, wanted), "gates were rounded"


def test_geglu_is_one_expression_wherever_it_is_computed():
    gate, up = draw(3, 96) * 4, draw(3, 96, seed=1)
    gate[0, :6] = torch.tensor([0.0, -0.0, -2e19, 2e19, -9.4, 1e-30])
    rows = interleaved(gate.t(), up.t()).t().contiguous()
    whole = activation.activate_and_multiply(rows, torch.float32, "gelu_tanh")
    gate = gate.double()
    exact = 0.5 * gate * (1 + (0.7978845608 * (gate + 0.044715 * gate**3)).tanh()) * up.double()
    assert ((whole - exact).abs() <= 1e-6 * (1 + exact.abs())).all()
    x, w = draw(5, 64, dtype=torch.bfloat16), draw(96, 64, dtype=torch.bfloat16, seed=1)
    wide = chain(x, w[None], REFERENCE)[0]
    wanted = activation.activate_and_multiply(wide, torch.bfloat16, "gelu_tanh")
    for tile in GATED:
        assert_same_bits(gated(x, w, tile, ACTIVATIONS["gelu_tanh"]), wanted, f"{tile}")
        assert not same_bits(gated(x, w, tile), wanted)
    assert_same_bits(gated_gemm.gated_gemm(x, w, GATED[0], activation="gelu_tanh"), wanted)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    some_slow([(1, 96, 64), (21, 144, 48)], [(1, 96, 64), (21, 144, 48), (5, 2368, 32)]),
)
def test_a_gated_product_has_the_values_of_the_cpu(m, n, k):
    """Not its bytes: fp32 sums have another order here, exp2 of -g * log2 e is not torch's exp."""
    x, w = draw(m, k), draw(n, k, seed=1)
    wanted = cpu_gated.gated_gemm(x, w)
    for tile in GATED[:4]:
        got = gated(x, w, tile)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        assert (got - wanted).abs().amax() <= 1e-6 * wanted.abs().amax(), tile


def test_rows_and_shards_of_a_gated_product_keep_their_bits(monkeypatch):
    """A rank's rows of the interleaved weight give the whole's columns; a row is alone the same."""
    monkeypatch.setattr(gemm, "descriptor_sms", lambda *_: 0)
    x, w = draw(21, 64, dtype=torch.bfloat16), draw(192, 64, dtype=torch.bfloat16, seed=1)
    whole = gated_gemm.gated_gemm(x, w)
    assert_same_bits(whole, gated(x, w, REFERENCE), "the static choice")
    for ranks in (2, 4, 12):
        parts = [gated_gemm.gated_gemm(x, part) for part in w.chunk(ranks)]
        assert_same_bits(torch.cat(parts, 1), whole, f"{ranks} ranks")
    for row in (0, 20):
        assert_same_bits(gated_gemm.gated_gemm(x[row : row + 1], w)[0], whole[row], "row")
