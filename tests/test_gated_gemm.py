"""Gate and up products with SiLU: which kernel runs, what start-up tries, and the bits on a CPU."""

import pytest
import torch

pytest.importorskip("triton")

from tests.bits import assert_same_bits, same_bits
from tpdet.kernels import ops
from tpdet.kernels.cuda import admission, gated_gemm, gemm, trial_data
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.shape_table import Choice, Product, ShapeTable

TILE = Variant(16, 64, 64, 4, 5, swap=True)
LIMITS = {"column": 8, "head": 8}


def exact(x, weight, bias, out_dtype, variant=None):
    return (x.float() @ weight.float().t()).to(out_dtype)


def gated(columns):
    gate, up = columns.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(columns.dtype)


@pytest.fixture
def taken(monkeypatch):
    """The door without a GPU: (way, its tile) of each call, and the bits of a product apart."""
    ways = []

    def one(x, w, y, tile, sms):
        ways.append(("one", tile))
        y.copy_(gated(exact(x, w, None, x.dtype)))

    monkeypatch.setattr(gated_gemm, "run_gated", one)
    monkeypatch.setattr(gated_gemm, "descriptor_sms", lambda *_: 132)
    apart = lambda y: ways.append(("two",)) or gated(y)
    monkeypatch.setattr(gated_gemm, "silu_and_multiply", apart)
    monkeypatch.setattr(admission.activation, "silu_and_multiply", gated)
    for module in (gated_gemm, gemm):
        monkeypatch.setattr(module, "column_gemm", exact)
    return ways


def way(taken, m, n, k=64, dtype=torch.bfloat16, **how):
    taken.clear()
    x = trial_data.trial_rows("random", m, k, "cpu")
    w = trial_data.trial_weight("random", n, k, "cpu")
    y = gated_gemm.gated_gemm(x.to(dtype), w.to(dtype), **how)
    assert y.shape == (m, n // 2) and y.dtype == dtype
    return taken[0][0]


def test_the_size_chooses_and_a_keyword_overrides(taken, monkeypatch):
    monkeypatch.setattr(gated_gemm, "GATED_ELEMENTS", 8 * 24)
    assert way(taken, 8, 48) == "one" and way(taken, 7, 48) == "two" and way(taken, 8, 46) == "two"
    assert way(taken, 8, 48, fused=False) == "two" and way(taken, 1, 16, fused=True) == "one"
    assert way(taken, 8, 48, k=96) == "two"  # no whole number of steps
    assert way(taken, 8, 48, dtype=torch.float32) == "two"
    other = Variant(64, 128, 64, 4, 4, descriptor=True)
    assert way(taken, 8, 48, tile=other) == "one" and taken[0][1] == other
    monkeypatch.setattr(gated_gemm, "descriptor_sms", lambda *_: 0)
    assert way(taken, 8, 48) == "two"
    monkeypatch.setattr(gated_gemm, "GATED_ELEMENTS", None)
    assert way(taken, 64, 48) == "two"


@pytest.mark.parametrize(("m", "n", "k"), [(8, 48, 96), (8, 47, 64), (0, 48, 64)])
def test_one_kernel_that_does_not_fit_is_refused(taken, m, n, k):
    x, w = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit: use fused=False"):
        gated_gemm.gated_gemm(x, w, fused=True)


def admit(column=8):
    product = Product("column", 4096, 64)
    table = ShapeTable({}, {product: {8: Choice(8, TILE)}})
    return admission.check([product], torch.device("cpu"), LIMITS, table=table)


def test_start_up_tries_the_one_kernel_where_it_would_run(taken, monkeypatch):
    monkeypatch.setattr(admission, "environment", lambda device: {"cublas": "13.1.0"})
    monkeypatch.setattr(gated_gemm, "GATED_ELEMENTS", 8 * 2048)
    assert admit().tried == 1 and len(taken) == len(trial_data.KINDS)

    def wrong(x, w, y, tile, sms):
        y.copy_(gated(exact(x, w, None, x.dtype)))
        y.view(torch.int16)[7, 2047] ^= 1

    monkeypatch.setattr(gated_gemm, "run_gated", wrong)
    with pytest.raises(RuntimeError, match="column 4096x64, 8 rows, gated, cancelling data"):
        admit()
    monkeypatch.setattr(gated_gemm, "GATED_ELEMENTS", 8 * 2048 + 1)
    assert admit().tried == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_the_product_and_then_silu(dtype):
    x, w = torch.randn(37, 64).to(dtype), torch.randn(96, 64).to(dtype)
    y = ops.gated_gemm(x, w)
    assert_same_bits(y, ops.silu_and_multiply(ops.column_gemm(x, w)), "both")
    assert not same_bits(y, ops.gated_gemm(x, w.roll(48, 0)))  # gate comes first
