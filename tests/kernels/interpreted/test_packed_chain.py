"""`packed/chain.py` without a GPU: its programs emulated, beside the chain over dense numbers.

Instructions of `recipes.py` are replaced by the rule of each word; a GPU shows that they are it.
"""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kernels.cpu.test_ordered_weight import FORMS, drawn
from tests.kernels.interpreted.test_gluon_gemm import activate_and_multiply, described
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.emulated_warps import Pointer, grouped_product, run_program
from tpdet.kernels import order
from tpdet.kernels.cuda.gemm.choice.leaf_choice import cut_roots
from tpdet.kernels.cuda.gemm.packed import chain
from tpdet.kernels.cuda.gemm.packed.launch import ONE_LEAF
from tpdet.kernels.cuda.gemm.variants import gated
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.pointwise import activation
from tpdet.kernels.inputs.ordered import E2M1
from tpdet.kernels.inputs.ordering import ordered_weight
from tpdet.kernels.inputs.packed import code_table, interleaved_rows, side_by_side

ROWS, GROUPS, DEPTH = 16, 2, 64


def replaced(recipe):
    """`recipes.py` in torch: a scale word is the bits of the scale in fp32."""
    table = code_table("e2m1" if recipe == E2M1 else "int", 4, 8).view(torch.float32)
    numbers = table.view(256, 2)[:16, 0]

    def four(words, scales, _):
        codes = torch.stack([words >> 8 * i & 255 for i in range(4)])
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        return (values * scales.view(torch.float32)).bfloat16().unbind()

    def eight(words, scales, _):
        at = [4 * (pair + 4 * i) for pair in range(4) for i in range(2)]
        codes = torch.stack([words >> shift & 15 for shift in at])
        return (numbers[codes] * scales.view(torch.float32)).bfloat16().unbind()

    def scale_words(scales, _):
        if recipe == E2M1:
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        return scales.float().view(torch.int32)

    return SimpleNamespace(four=four, eight=eight, scale_words=scale_words)


def launch(
    x, weight, out_dtype=torch.bfloat16, bias=None, gate=0, stages=3, depth=DEPTH, root=ONE_LEAF
):
    """Every program of the kernel in turn: x [M, L * K] -> y [units of the root, M, N]."""
    (leaves, n, k), m = weight.shape, len(x)
    units = leaves // math.prod(root)
    y = torch.full((units, m, n // 2 if gate else n), torch.nan, dtype=out_dtype)
    groups = math.prod(root) * k // weight.group
    kept = max(1 << (groups - 1).bit_length(), depth // weight.group)
    form = chain.PackedForm(
        weight.recipe,
        weight.bits,
        ROWS,
        GROUPS,
        depth,
        stages,
        weight.group,
        weight.scale_rows,
        kept,
        bias is not None,
        gate,
        root,
    )
    arguments = {
        "code_tiles": described(weight.codes),
        "x_tiles": described(x),
        "scales": Pointer(weight.scales),
        "y": Pointer(y),
        "bias": Pointer(x if bias is None else bias),
        "m": m,
        "n": n,
        "steps": k // depth,
        "blocks": -(-n // 64),
        "FORM": form,
        "DEPENDENT": False,
    }
    tiles = -(-m // ROWS) * -(-n // (64 * GROUPS))
    with mock.patch.object(chain, "recipes", replaced(weight.recipe)):
        for program in range(tiles):
            for leaf in range(units):
                others = (warp_pipeline,)
                run_program(
                    chain.packed_chain, (gated, activation), (program, leaf), arguments, 1, others
                )
    return y


def rows(m, k, seed=7):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return (x * x.exp()).bfloat16()


def chained(x, numbers):
    """One chain over the numbers of each row, groups of 16 of ascending K, from +0."""
    return grouped_product(x, numbers.T, torch.zeros(len(x), len(numbers)))


@pytest.mark.parametrize("form", FORMS)
class TestTheDenseChain:
    """Products of packed weights have the bits of the chain over their numbers."""

    def test_of_a_column_product(self, form):
        matrix, x = drawn(form, 200, 256), rows(19, 256)
        for depth in (64, 128):
            got = launch(x, ordered_weight([matrix]), depth=depth)[0]
            assert_same_bits(got, chained(x, matrix[:]).bfloat16(), f"{form} {depth}")

    def test_of_leaves(self, form):
        matrix, x = drawn(form, 72, 512), rows(5, 512)
        leaves = side_by_side(matrix, (256, 256)).matrices
        parts = x.split(256, 1)
        wanted = [chained(part, leaf[:]) for part, leaf in zip(parts, leaves, strict=True)]
        got = launch(x, ordered_weight(leaves), torch.float32)
        assert_same_bits(got, torch.stack(wanted), form)


@pytest.mark.parametrize("order_name", order.FOLD_ORDERS)
def test_leaves_are_folded_in_the_order_of_their_root(order_name):
    matrix, x = drawn("int4", 72, 1024), rows(5, 1024)
    leaves = side_by_side(matrix, (128,) * 8).matrices
    weight = ordered_weight(leaves)
    sums = [chained(part, leaf[:]) for part, leaf in zip(x.split(128, 1), leaves, strict=True)]
    roots = order.fold_plan(order_name, 8, 1).roots[0]
    for cut in (2, 4, 8):
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, 8, parts[0])
        if form is not None:
            wanted = [order.evaluate(unit, lambda i: sums[i], torch.add) for unit in parts[0]]
            got = launch(x, weight, torch.float32, root=form.shape)
            assert_same_bits(got, torch.stack(wanted), f"{order_name}, {cut} leaves")


def test_a_bias_is_added_before_the_rounding():
    matrix, x, bias = drawn("int4", 80, 128), rows(3, 128), rows(1, 80, 1)[0]
    wanted = (chained(x, matrix[:]) + bias.float()).bfloat16()
    assert_same_bits(launch(x, ordered_weight([matrix]), bias=bias)[0], wanted, "bias")


def test_gates_are_joined_before_the_rounding():
    both, x = (
        interleaved_rows(drawn("fp8 blocks", 72, 128), drawn("fp8 blocks", 72, 128, 1)),
        rows(9, 128),
    )
    whole = chained(x, both[:])
    wanted = activate_and_multiply(whole).bfloat16()
    got = launch(x, ordered_weight([both]), gate=1)[0]
    assert_same_bits(got, wanted, "gated")
    assert not same_bits(activate_and_multiply(whole.bfloat16().float()).bfloat16(), wanted)


def test_another_order_of_groups_shows():
    matrix, x = drawn("int4", 64, 256), rows(4, 256)
    backwards = torch.arange(256).view(16, 16).flip(0).flatten()
    other = chained(x[:, backwards], matrix[:][:, backwards])
    assert not same_bits(launch(x, ordered_weight([matrix]), torch.float32)[0], other)
