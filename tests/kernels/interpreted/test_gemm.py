"""The GPU's GEMM-side kernels in Triton's interpreter, their sums in an exact order.

fp16 and fp32: bf16 is wrong in the interpreter.
"""

import pytest
import torch

from tests.kernels.interpreted.product_inputs import chain, draw
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise import fold as cpu_fold
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.choice.variants import FOLDS
from tpdet.kernels.cuda.gemm.variants import leaf_fold as gemm_fold
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.pointwise import activation, fold, norm
from tpdet.kernels.inputs.norm import Norm

SMALL = (
    Tile(16, 64, 32, 4, 3, "pointer_swapped"),
    Tile(16, 16, 16, 4, 3),
    Tile(64, 32, 32, 4, 3),
    Tile(32, 32, 32, 4, 3, "descriptor"),
    Tile(64, 32, 16, 4, 3, "descriptor", halves=2),
)


def test_every_tile_is_one_bit_class():
    for dtype in (torch.float16, torch.float32):
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
            if FOLDS[kernel].fits(form, 32, variant):
                y = torch.zeros(plan.slots, 21, 48)
                FOLDS[kernel].run(columns, w[mine].contiguous(), y, form, variant, 3)
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
    gemm_fold.run_flat(x, w, y, form, Tile(32, 16, 16, 4, 3, "descriptor"), 1)
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


def test_norms_have_the_bits_of_the_cpu():
    for dtype in (torch.float32, torch.float16):
        for size in (64, 200, 1024):
            x = draw(5, size, dtype=dtype, spread=True)
            x[1], x[2] = 0.0, x[2] * 1e-5
            if dtype == torch.float32:
                x[3] = x[3] * 1e-42
            w = draw(size, dtype=dtype, seed=1)
            wanted = cpu_norm.rms_norm(x, Norm(w, 1e-6))
            assert_same_bits(norm.rms_norm(x, Norm(w, 1e-6)), wanted, f"{dtype} {size}")
            total, bias = draw(5, size, seed=2), draw(size, dtype=dtype, seed=3)
            for shift in (None, bias):
                h = cpu_norm.add_residual(total, shift, x)
                assert_same_bits(norm.add_residual(total, shift, x), h, "residual")
                both = norm.add_residual_and_norm(total, shift, x, Norm(w, 1e-6))
                assert_same_bits(both[0], h, "fused residual")
                assert_same_bits(both[1], cpu_norm.rms_norm(h, Norm(w, 1e-6)), "fused norm")
    x = draw(2, 64)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    assert norm.rms_norm(x, Norm(torch.ones(64), 1e-6)).isnan().all()


def test_silu_gives_a_slice_the_bits_of_the_whole():
    gate, up = draw(3, 1100), draw(3, 1100, seed=1)
    gate[0, :4] = torch.tensor([0.0, -0.0, -200.0, 200.0])
    whole = activation.silu_and_multiply(torch.cat([gate, up], 1))
    part = activation.silu_and_multiply(torch.cat([gate[:, 3:103], up[:, 3:103]], 1))
    assert_same_bits(part, whole[:, 3:103].contiguous(), "slice")
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert ((whole - exact).abs() <= 1e-6 * exact.abs() + 1e-30).all()
