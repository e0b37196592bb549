"""Products by packed weights without a GPU: programs emulated, beside the chain over numbers.

Instructions of `recipes.py` are replaced by the rule of each word; a GPU shows that they are it.
"""

import itertools
import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kernels.cpu.test_ordered_weight import FORMS, drawn
from tests.kernels.interpreted.emulated.warps import Pointer, grouped_product, run_program
from tests.kernels.interpreted.test_gluon_gemm import activate_and_multiply, described
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import order
from tpdet.kernels.cuda.gemm.choice.leaf_choice import cut_roots
from tpdet.kernels.cuda.gemm.packed import chain, numbers, turns, warp_specialised
from tpdet.kernels.cuda.gemm.packed.launch import ONE_LEAF, RowBlocks
from tpdet.kernels.cuda.gemm.variants import chain as stages_of_chain
from tpdet.kernels.cuda.gemm.variants import gated, pointer
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.pointwise import activation
from tpdet.kernels.inputs.ordered import E2M1, E4M3, INT4_ZERO, INT4_ZERO_OF_HALF, INT8
from tpdet.kernels.inputs.ordering import ordered_weight
from tpdet.kernels.inputs.packed import code_table, interleaved_rows, side_by_side

ROWS, GROUPS, DEPTH = 16, 2, 64


def replaced(recipe):
    """`recipes.py` in torch: a scale word is the bits of the scale in fp32.

    The last five are the zero point's, where there is one: scales of 16 bits leave them free.
    """
    zeroed = recipe in (INT4_ZERO, INT4_ZERO_OF_HALF)
    table = code_table("e2m1" if recipe == E2M1 else "int", 4, 0 if zeroed else 8)
    numbers = table.view(torch.float32).view(256, 2)[:16, 0]

    def four(words, scales, _, half):
        if recipe not in (E4M3, INT8):
            return eight(words, scales, _)[4 * half : 4 * half + 4]
        codes = torch.stack([words >> 8 * i & 255 for i in range(4)])
        values = codes.float() - 128.0
        if recipe == E4M3:
            values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        return (values * scales.view(torch.float32)).bfloat16().unbind()

    def eight(words, scales, _):
        at = [4 * (pair + 4 * i) for pair in range(4) for i in range(2)]
        values = numbers[torch.stack([words >> shift & 15 for shift in at])]
        if zeroed:
            values, scales = values - (scales & 31).float(), scales & -32
        return (values * scales.view(torch.float32)).bfloat16().unbind()

    def scale_words(scales, _):
        if recipe == E2M1:
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        return scales.float().view(torch.int32)

    return SimpleNamespace(
        four=four,
        eight=eight,
        scale_words=scale_words,
        zeroed=lambda _: zeroed,
        with_zeros=lambda words, zeros: words | zeros.int(),
    )


def launch(
    x,
    weight,
    out_dtype=torch.bfloat16,
    bias=None,
    gate=0,
    stages=3,
    depth=DEPTH,
    root=ONE_LEAF,
    blocks=None,
    programs=0,
):
    """Every program of the kernel in turn: x [M, L * K] -> y [units of the root, M, N].

    blocks: a `RowBlocks`; then x [P, K] -> y [1, P, N].
    """
    (leaves, n, k), m = weight.shape, len(x) if blocks is None else ROWS * (len(blocks[0]) - 1)
    units = leaves // math.prod(root) if blocks is None else 1
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
        k // depth % 2 == 1,
        0 if blocks is None else 1 + blocks.of_step,
        programs,
    )
    ids = Pointer(weight.codes if blocks is None else blocks.expert_ids)
    arguments = chain_arguments(x, weight, y, m, bias, form) | {"expert_ids": ids}
    grid = -(-m // ROWS) * -(-n // (64 * GROUPS)), units
    run_chains(chain.packed_chain, grid, arguments, weight, (warp_pipeline, numbers))
    return y


def chain_arguments(x, weight, y, m, bias, form):
    """What both kernels of a chain take."""
    _, n, k = weight.shape
    return {
        "code_tiles": described(weight.codes),
        "x_tiles": described(x),
        "scales": Pointer(weight.scales),
        "zeros": Pointer(weight.scales if weight.zeros is None else weight.zeros),
        "y": Pointer(y),
        "bias": Pointer(x if bias is None else bias),
        "m": m,
        "n": n,
        "steps": k // form.DEPTH,
        "blocks": -(-n // 64),
        "FORM": form,
        "DEPENDENT": False,
    }


def run_chains(kernel, grid, arguments, weight, others):
    """Every program of a kernel of chains in turn."""
    recipes = replaced(weight.recipe)
    with (
        mock.patch.object(chain, "recipes", recipes),
        mock.patch.object(numbers, "recipes", recipes),
    ):
        for place in itertools.product(*map(range, grid)):
            run_program(kernel, (gated, activation), place, arguments, 1, others)


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
            got = launch(x, ordered_weight([matrix]), depth=depth, programs=depth // 64)[0]
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
            for programs in (0, 2):
                got = launch(x, weight, torch.float32, root=form.shape, programs=programs)
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


def launch_turns(x, weight, out_dtype=torch.bfloat16, bias=None, gate=0, depth=DEPTH):
    """Every program of the kernel in turn: x [M, L * K] -> y [L, M, N]."""
    (leaves, n, k), m = weight.shape, len(x)
    y = torch.full((leaves, m, n // 2 if gate else n), torch.nan, dtype=out_dtype)
    kept = max(1 << (k // weight.group - 1).bit_length(), depth // weight.group)
    scales = weight.group, weight.scale_rows, kept
    ends = bias is not None, gate, ONE_LEAF, k // depth % 2 == 1, 0, 1
    form = chain.PackedForm(weight.recipe, weight.bits, ROWS, 1, depth, 3, *scales, *ends)
    arguments = chain_arguments(x, weight, y, m, bias, form) | {"HANDED": None}
    grid = -(-m // ROWS) * -(-n // 64), leaves
    run_chains(turns.packed_turns, grid, arguments, weight, (warp_pipeline, numbers, chain))
    return y


@pytest.mark.parametrize("form", FORMS)
def test_warpgroups_that_take_turns_make_one_chain(form):
    """An odd and an even number of steps, leaves, a bias and gates."""
    for k, depth in ((256, 64), (384, 128)):
        matrix, x, bias = drawn(form, 200, k), rows(19, k), rows(1, 200, 1)[0]
        wanted = (chained(x, matrix[:]) + bias.float()).bfloat16()
        got = launch_turns(x, ordered_weight([matrix]), bias=bias, depth=depth)[0]
        assert_same_bits(got, wanted, f"{form} {k} {depth}")
    matrix, x = drawn(form, 72, 512), rows(5, 512)
    leaves = side_by_side(matrix, (256, 256)).matrices
    parts = zip(x.split(256, 1), leaves, strict=True)
    wanted = torch.stack([chained(part, leaf[:]) for part, leaf in parts])
    assert_same_bits(launch_turns(x, ordered_weight(leaves), torch.float32), wanted, form)
    both = interleaved_rows(drawn(form, 72, 128), drawn(form, 72, 128, 1))
    whole = chained(x[:, :128], both[:])
    got = launch_turns(x[:, :128].contiguous(), ordered_weight([both]), gate=1)[0]
    assert_same_bits(got, activate_and_multiply(whole).bfloat16(), "gated")


def launch_warps(
    x,
    weight,
    out_dtype=torch.bfloat16,
    bias=None,
    gate=0,
    root=ONE_LEAF,
    blocks=None,
    sent=True,
    consumers=2,
):
    """Every program of the kernel in turn: x [M, L * K] -> y [roots, M, N]; of experts x [P, K]."""
    leaves, n, k = weight.shape
    roots = leaves // math.prod(root) if blocks is None else 1
    m = len(x) if blocks is None else ROWS * (len(blocks.expert_ids) - 1)
    y = torch.full((roots, m, n // 2 if gate else n), torch.nan, dtype=out_dtype)
    form = warp_specialised.WarpPackedForm(
        weight.recipe,
        weight.bits,
        ROWS,
        1,
        DEPTH,
        3,
        weight.group,
        weight.scale_rows,
        bias is not None,
        gate,
        root,
        k // DEPTH % 2 == 1,
        0 if blocks is None else 1 + blocks.of_step,
        sent,
        consumers,
    )
    arguments = {
        "code_tiles": described(weight.codes),
        "x_tiles": described(x),
        "y_tiles": described(y.view(-1, y.shape[-1])),
        "scales": Pointer(weight.scales),
        "zeros": Pointer(weight.scales if weight.zeros is None else weight.zeros),
        "y": Pointer(y),
        "bias": Pointer(x if bias is None else bias),
        "expert_ids": Pointer(weight.codes if blocks is None else blocks.expert_ids),
        "m": m,
        "n": n,
        "roots": roots,
        "steps": k // DEPTH,
        "FORM": form,
        "DEPENDENT": False,
    }
    triton, others = (pointer, gated, activation), (warp_pipeline, stages_of_chain, numbers)
    recipes = replaced(weight.recipe)
    with (
        mock.patch.object(numbers, "recipes", recipes),
        mock.patch.object(warp_specialised, "recipes", recipes),
    ):
        for program in range(3):
            run_program(warp_specialised.warp_packed_chain, triton, program, arguments, 3, others)
    return y


@pytest.mark.parametrize("form", FORMS)
def test_a_column_product_has_the_dense_chain_s_bits(form):
    longer = 192 if form == "mxfp4" else 384  # an odd number of steps, or a loop's second round
    for k, consumers in ((256, 2), (128, 3), (longer, 3)):
        matrix, x = drawn(form, 200, k), rows(19, k)
        got = launch_warps(x, ordered_weight([matrix]), consumers=consumers)[0]
        assert_same_bits(got, chained(x, matrix[:]).bfloat16(), f"{form} {k} {consumers}")


def test_bias_and_gates_stand_before_the_rounding():
    matrix, x, bias = drawn("int4", 80, 128), rows(3, 128), rows(1, 80, 1)[0]
    wanted = (chained(x, matrix[:]) + bias.float()).bfloat16()
    assert_same_bits(launch_warps(x, ordered_weight([matrix]), bias=bias)[0], wanted, "bias")
    both = interleaved_rows(drawn("fp8 blocks", 72, 128), drawn("fp8 blocks", 72, 128, 1))
    wanted = activate_and_multiply(chained(x, both[:])).bfloat16()
    assert_same_bits(launch_warps(x, ordered_weight([both]), gate=1)[0], wanted, "gated")


@pytest.mark.parametrize("order_name", order.FOLD_ORDERS)
def test_warps_fold_leaves_in_the_order_of_their_root(order_name):
    matrix = drawn("int4", 72, 1024)
    leaves = side_by_side(matrix, (128,) * 8).matrices
    weight, roots = ordered_weight(leaves), order.fold_plan(order_name, 8, 1).roots[0]
    for m, sent in ((5, False), (16, True)):
        x = rows(m, 1024)
        parts = zip(x.split(128, 1), leaves, strict=True)
        sums = [chained(part, leaf[:]) for part, leaf in parts]
        for cut in (2, 4, 8):
            cuts = cut_roots(roots, cut)
            form = None if cuts is None else root_form(0, 8, cuts[0])
            if form is not None and not (form.groups > 1 and form.parts > 1):
                wanted = [order.evaluate(unit, lambda i: sums[i], torch.add) for unit in cuts[0]]  # noqa: B023
                whole = len(wanted) == 1 or sent
                got = launch_warps(x, weight, torch.float32, root=form.shape, sent=whole)
                assert_same_bits(got, torch.stack(wanted), f"{order_name}, {cut} leaves")


@pytest.mark.parametrize("kernel", [launch, launch_warps, partial(launch_warps, consumers=3)])
@pytest.mark.parametrize("of_step", [False, True])
def test_a_block_of_rows_has_its_expert_s_weight(of_step, kernel):
    experts = [drawn("mxfp4", 72, 192, seed) for seed in range(3)]
    ids = torch.tensor([3, 0, 2, 2, 7], dtype=torch.int32)
    x, bias = rows(ROWS if of_step else 4 * ROWS, 192), rows(3, 72, 1)
    blocks = RowBlocks(ids, of_step)
    got = kernel(x, ordered_weight(experts), bias=bias, blocks=blocks)[0].split(ROWS)
    for block, expert in enumerate(ids[1:4]):
        own = x if of_step else x.split(ROWS)[block]
        wanted = chained(own, experts[expert][:]) + bias[expert].float()
        assert_same_bits(got[block], wanted.bfloat16(), f"block {block}")
    assert got[3].isnan().all(), "a block that does not exist was computed"
