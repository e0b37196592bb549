"""The residual added in a row product: who asks, which products do it, what start-up tries."""

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.bits import assert_same_bits, same_bits
from tests.engine_harness import ask, run
from tests.test_row_table import ENVIRONMENT, LIMITS, apart
from tpdet.comm.fold import GatherExchange
from tpdet.comm.world import SoloWorld
from tpdet.kernels import ops, order
from tpdet.kernels.cuda import admission, leaf_gemm, norm, shape_table
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.leaf_variants import LeafChoice
from tpdet.kernels.cuda.root_form import _expression
from tpdet.kernels.cuda.shape_table import Choice, Product, ShapeTable
from tpdet.kernels.partial_sums import PartialSums

TILE = Variant(128, 128, 64, 4, 6, descriptor=True)
WHOLE = {name: (order.fold_tree(name, 8),) for name in order.FOLD_ORDERS}


@pytest.fixture
def asked(monkeypatch):
    """`leaf_sums` without a GPU: the residual that its "gluon" kernel was given in each call."""
    given = []

    def fold(x, w, y, form, tile, sms, residual=None):
        given.append(residual)
        values = apart(x, w)
        for i in range(form.roots):
            root = _expression(form, i * form.leaves)
            total = order.evaluate(root, lambda leaf: values[leaf], torch.add)
            y[i] = total if residual is None else (total + residual.float()).to(y.dtype)

    monkeypatch.setattr(leaf_gemm, "descriptor_sms", lambda *_: 132)
    monkeypatch.setattr(leaf_gemm, "run_gluon_fold", fold)
    monkeypatch.setattr(leaf_gemm, "leaf_gemm", apart)
    monkeypatch.setattr(leaf_gemm, "run_fold", lambda x, w, y, *_: y.zero_())
    return given


def operands(m, n=96, k=128, leaves=8):
    draw = lambda *shape, seed: torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed)
    ).bfloat16()
    return draw(m, leaves * k, seed=0), draw(leaves, n, k, seed=1), draw(m, n + 8, seed=2)[:, :n]


@pytest.mark.parametrize("name", ["sequential", "pairs"])
def test_a_whole_root_takes_the_residual_and_the_norm_reads_it(asked, monkeypatch, name):
    monkeypatch.setattr(leaf_gemm, "RESIDUAL_ROWS", 8)
    monkeypatch.setattr(norm, "_launch", lambda x, weight, y, *_: y.copy_(x))
    (x, w, residual), choice = operands(8), LeafChoice(8, "gluon", TILE)
    sums = leaf_gemm.leaf_sums(x, w, WHOLE[name], choice, residual)
    plain = leaf_gemm.leaf_sums(x, w, WHOLE[name], choice)
    assert sums.added and not plain.added and asked[0] is residual and asked[1] is None
    assert plain.values.dtype == torch.float32 and sums.is_total
    h = (plain.values[0] + residual.float()).to(residual.dtype)
    whole = GatherExchange(order.fold_plan(name, 8, 1), SoloWorld()).everyones(sums)
    got, y = norm.fold_and_norm(whole, None, residual, torch.ones(96), 1e-6)
    assert_same_bits(got, h, "h")
    assert_same_bits(y, h, "what the norm reads")
    with pytest.raises(ValueError, match="added after it"):
        norm.fold_and_norm(whole, torch.ones(96), residual, torch.ones(96), 1e-6)


def test_other_products_leave_it_to_the_reader(asked, monkeypatch):
    monkeypatch.setattr(leaf_gemm, "RESIDUAL_ROWS", 8)
    x, w, residual = operands(8)
    gluon = lambda cut: LeafChoice(cut, "gluon", TILE)
    cases = [("pairs", gluon(2)), ("tree", gluon(8)), ("tree", gluon(4)),
             ("pairs", LeafChoice(8, "flat", TILE))]  # fmt: skip
    for name, choice in cases:
        sums = leaf_gemm.leaf_sums(x, w, WHOLE[name], choice, residual)
        assert not sums.added and sums.values.dtype == torch.float32, (name, choice)
    few = leaf_gemm.leaf_sums(x[:7], w, WHOLE["pairs"], gluon(8), residual[:7])
    monkeypatch.setattr(leaf_gemm, "RESIDUAL_ROWS", None)
    never = leaf_gemm.leaf_sums(x, w, WHOLE["pairs"], gluon(8), residual)
    assert not few.added and not never.added and set(asked) == {None}


def test_start_up_tries_it(asked, monkeypatch):
    monkeypatch.setattr(leaf_gemm, "RESIDUAL_ROWS", 8)
    monkeypatch.setattr(admission, "environment", lambda device: dict(ENVIRONMENT))
    product = Product("row", 96, 128, 8, shape_table.write_roots(WHOLE["pairs"]))
    table = ShapeTable(ENVIRONMENT, {product: {8: Choice(8, TILE, None, 8, "gluon")}})
    check = lambda: admission.check([product], torch.device("cpu"), LIMITS, table=table)
    assert check().tried == 1 and [r is None for r in asked] == [True, False] * 3
    right = leaf_gemm.run_gluon_fold

    def twice_rounded(x, w, y, form, tile, sms, residual=None):
        total = torch.empty(1, *y.shape[1:]) if residual is not None else y
        right(x, w, total, form, tile, sms)
        if residual is not None:
            y[0] = total[0].to(y.dtype) + residual

    monkeypatch.setattr(leaf_gemm, "run_gluon_fold", twice_rounded)
    with pytest.raises(RuntimeError, match=re.escape("128x128x64 w4 s6 tma, random data and a")):
        check()
    shape_table.admit({})


@pytest.mark.parametrize("tp", [1, 2])
def test_only_a_rank_without_peers_asks(tiny_model, monkeypatch, tp):
    """Its product may add the residual: the logits keep their bits. With peers none is given."""
    model, prompts = tiny_model("qwen2", kv_heads=2), [ask("a", range(5, 60))]
    wanted, given, sums_of = run(model, prompts, tp=tp), [], ops.leaf_sums

    def add_at_once(x, weight, roots, residual=None):
        given.append(residual is not None)
        sums = sums_of(x, weight, roots)
        if residual is None:
            return sums
        total = order.evaluate(roots[0], lambda i: sums.values[i], torch.add)
        h = (total + residual.float()).to(residual.dtype)
        return PartialSums(h[None], (0,), added=True)

    def read(sums, bias, residual, weight, eps):
        if sums.added:
            return sums.values[0], ops.rms_norm(sums.values[0], weight, eps)
        return fold(sums, bias, residual, weight, eps)

    fold = ops.fold_and_norm
    monkeypatch.setattr(ops, "leaf_sums", add_at_once)
    monkeypatch.setattr(ops, "fold_and_norm", read)
    found = run(model, prompts, tp=tp)
    assert given and any(given) == (tp == 1)
    assert found.logits.keys() == wanted.logits.keys()
    assert all(same_bits(found.logits[key], wanted.logits[key]) for key in wanted.logits)
