"""`warp_specialised.py` without a GPU: its programs emulated, beside leaves folded in torch.

`emulated_warps.py` has what the emulation shows and what it does not.
"""

from types import SimpleNamespace

import numpy
import torch

from tests.kernels.interpreted.emulated.warps import Pointer, grouped_product, run_program
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import order
from tpdet.kernels.cuda.gemm.variants import chain
from tpdet.kernels.cuda.gemm.variants import gated as gated_epilogue
from tpdet.kernels.cuda.gemm.variants import pointer as gemm_pointer
from tpdet.kernels.cuda.gemm.variants import warp_specialised as gluon_leaf_gemm
from tpdet.kernels.cuda.gemm.variants import warp_specialised_parts as parts_gemm
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, root_form
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.pointwise import activation
from tpdet.kernels.inputs.gated import gate_and_up
from tpdet.kernels.partial_sums import relative_roots

WarpForm = gluon_leaf_gemm.WarpForm
KERNEL = gluon_leaf_gemm.warp_specialised_fold
DEPTH, LEAVES = 16, 8


def draw(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * (2.0 * x).exp()).half()


def described(values):
    return SimpleNamespace(tensor=values, layout=None, dtype=values.dtype)


def launch(x, w, y, bias, form, columns, stages, programs, sent, gated=False):
    """Every program of the kernel in turn: x [M, L * K], w [L, N, K] -> y [R, M, N], filled.

    gated: w is interleaved, and y is [1, M, N / 2].
    """
    leaves, n, k = w.shape
    y.fill_(torch.nan)
    ends = n % columns == 0, sent, bias is not None, int(gated)
    made_for = WarpForm(columns, DEPTH, stages, *form.shape, *ends)
    arguments = {
        "x_tiles": described(x),
        "w_tiles": described(w.view(leaves * n, k)),
        "y_tiles": described(y.view(-1, y.shape[-1])),
        "y": Pointer(y),
        "bias": Pointer(x if bias is None else bias),
        "m": x.shape[0],
        "n": n,
        "roots": form.roots,
        "steps": k // DEPTH,
        "FORM": made_for,
        "DEPENDENT": False,
    }
    for program in range(programs):
        triton = (gemm_pointer, gated_epilogue, activation)
        run_program(KERNEL, triton, program, arguments, programs, (warp_pipeline, chain))
    return y


def launch_parts(x, w, y, bias, stages, programs, gated=False):
    """Every program of the kernel of two parts: x [M, K], w [1, N, K] -> y [1, M, N], filled."""
    y.fill_(torch.nan)
    arguments = {
        "x_tiles": described(x),
        "w_wide": described(w[0]),
        "w_rest": described(w[0]),
        "y_wide": described(y[0]),
        "y_rest": described(y[0]),
        "bias": Pointer(x if bias is None else bias),
        "m": x.shape[0],
        "n": w.shape[1],
        "steps": x.shape[1] // DEPTH,
        "FORM": WarpForm(192, DEPTH, stages, BIAS=bias is not None, GATED=int(gated)),
        "DEPENDENT": False,
    }
    kernel, triton = parts_gemm.warp_specialised_parts, (gemm_pointer, gated_epilogue, activation)
    for program in range(programs):
        gluon = (warp_pipeline, gluon_leaf_gemm, chain)
        run_program(kernel, triton, program, arguments, programs, gluon)
    return y


def fold(x, w, form, stages, programs, sent=True):
    """Leaves folded: roots [R, M, N] fp32."""
    y = torch.empty(form.roots, x.shape[0], w.shape[1])
    return launch(x, w, y, None, form, 128, stages, programs, sent)


def leaf_sums(x, w):
    """One chain a leaf, groups of 16 of ascending K, from +0."""
    zeros = torch.zeros(x.shape[0], w.shape[1])
    parts = x.split(w.shape[2], 1)
    return [grouped_product(part, leaf.T, zeros) for part, leaf in zip(parts, w, strict=True)]


def rank_forms():
    """(leaves of a rank, its roots, their form): every order at TP 1, 2 and 4, what folds once."""
    seen = {}
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4):
            share = LEAVES // ranks
            for roots in order.fold_plan(name, LEAVES, ranks).roots:
                roots = relative_roots(roots)
                seen[share, root_form(0, share, roots)] = roots
    return [(share, roots, form) for (share, form), roots in seen.items() if form.leaves > 1]


def test_every_form_has_the_bits_of_leaves_folded_apart():
    for index, (leaves, roots, form) in enumerate(rank_forms()):
        m, width = (1, 70, 150, 130)[index % 4], (2 + index % 2) * DEPTH
        for n in (144, 256):
            x, w = draw(m, leaves * width), draw(leaves, n, width, seed=1)
            sums = leaf_sums(x, w)
            wanted = [order.evaluate(root, lambda i, s=sums: s[i], torch.add) for root in roots]
            for sent in (False, True)[: 2 if form.roots == 1 or m % 64 == 0 else 1]:
                got = fold(x, w, form, 2 + index % 3, 1 + index % 3, sent)
                assert_same_bits(got, torch.stack(wanted), f"{form}, {m} rows, {n} columns, {sent}")


def test_a_column_product_is_one_chain_with_its_bias_rounded_once():
    for m, n, programs in ((1, 264, 2), (150, 512, 3), (130, 256, 1)):
        x, w, bias = draw(m, 80), draw(1, n, 80, seed=1), draw(n, seed=2)
        zeros = torch.zeros(m, n)
        for shift in (None, bias):
            wanted = grouped_product(x, w[0].T, zeros)
            wanted = wanted if shift is None else wanted + shift.float()
            y = torch.empty(1, m, n, dtype=torch.float16)
            got = launch(x, w, y, shift, RootForm(1, 1, 1, 1), 256, 3, programs, True)
            assert_same_bits(got[0], wanted.half(), f"{m} rows, {n} columns, bias {shift is None}")
            got = launch_parts(x, w, y, shift, 3, programs)
            assert_same_bits(got[0], wanted.half(), f"{m} rows, {n} columns by 192, {shift}")


def activate_and_multiply(gate_up):
    """fp32 rows, interleaved, as `kernels/cuda/pointwise/activation.py` computes them."""
    gate, up = (part.contiguous() for part in gate_and_up(gate_up))
    power = torch.from_numpy(numpy.exp2(((0.0 - gate) * activation.LOG2_E.value).numpy()))
    return gate / (1.0 + power) * up


def test_a_gated_product_is_the_activation_of_one_chain_rounded_once():
    """Rows, columns and programs that leave a group of warps, a tile or a program without work."""
    cases = ((1, 272, 256, 3, 2), (150, 512, 256, 4, 3), (70, 144, 128, 6, 1), (130, 96, 256, 4, 1))
    for m, n, columns, stages, programs in cases:
        x, w = draw(m, 80), draw(1, n, 80, seed=1)
        wide = grouped_product(x, w[0].T, torch.zeros(m, n))
        y = torch.empty(1, m, n // 2, dtype=torch.float16)
        form = RootForm(1, 1, 1, 1)
        got = launch(x, w, y, None, form, columns, stages, programs, True, gated=True)[0]
        wanted = activate_and_multiply(wide).half()
        assert_same_bits(got, wanted, f"{m} rows, {n} columns by {columns}")
        got = launch_parts(x, w, y, None, stages, programs, gated=True)[0]
        assert_same_bits(got, wanted, f"{m} rows, {n} columns by 192")
        if same_bits(activate_and_multiply(wide.half().float()).half(), wanted):
            raise AssertionError("rounded gates and ups reached no bit")


def test_tiles_of_several_roots_stay_apart_when_rows_are_sixty_fours():
    x, w = draw(192, 4 * 32), draw(4, 144, 32, seed=1)
    sums = leaf_sums(x, w)
    wanted = torch.stack([sums[0] + sums[1], sums[2] + sums[3]])
    assert_same_bits(fold(x, w, RootForm(2, 1, 1, 2), 2, 2), wanted, "two roots of 192 rows")


def test_the_order_shows_and_a_cancelled_sum_is_plus_zero():
    x, w = draw(3, LEAVES * 32), draw(LEAVES, 128, 32, seed=1)
    forms = RootForm(1, 8, 1, 1), RootForm(1, 4, 1, 2), RootForm(1, 2, 2, 2)
    chained, paired, halved = (fold(x, w, form, 3, 1) for form in forms)
    if same_bits(chained, paired) or same_bits(paired, halved):
        raise AssertionError("the order of the additions reached no bit")
    half = lambda value: torch.full((1, 2 * 32), value).half()
    w = torch.full((2, 128, 32), 2.0**-24).half()
    w[1] = -w[1]
    got = fold(half(2.0**-24), w, RootForm(1, 2, 1, 1), 2, 1)
    assert_same_bits(got, torch.zeros_like(got), "a sum that cancels")
