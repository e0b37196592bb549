"""Leaves folded by warps of several trades: compiled for Hopper, emulated in a subprocess."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.test_triton_gemm import ROOT, assemble, check
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.gluon_leaf_gemm import fold_by_trades, gluon_fits
from tpdet.kernels.cuda.root_form import RootForm

FORMS = {  # GROUPS, PARTS, PAIR; additions a value, in the code
    "one": (1, 1, 1, 0), "cut": (2, 1, 1, 1), "sequential": (8, 1, 1, 1), "pairs": (4, 1, 2, 2),
    "tree": (2, 2, 2, 3),
}  # fmt: skip
SQUARE, WIDE = Variant(128, 128, 64, 4, 6), Variant(128, 256, 64, 4, 3)
ADDRESSES = 160  # bytes of addresses that a thread may spill, none of them between two steps


def compiled(variant, form, even=True):
    """PTX and the log of ptxas -v for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(2 * variant.depth, 16, 2)
    types = {
        "x_tiles": f"tensordesc<bf16[64,{variant.depth}],{layout!r}>",
        "w_tiles": f"tensordesc<bf16[{variant.columns},{variant.depth}],{layout!r}>",
        "y": "*fp32",
    } | dict.fromkeys(("m", "n", "roots", "steps"), "i32")  # fmt: skip
    groups, parts, pair, _ = FORMS[form]
    names = fold_by_trades.arg_names
    source = GluonASTSource(
        fn=fold_by_trades,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={
            "BN": variant.columns, "BK": variant.depth, "GROUPS": groups, "PARTS": parts,
            "PAIR": pair, "EVEN": even, "STAGES": variant.stages,
        },
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("y", "n")},
    )  # fmt: skip
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx, assemble(ptx)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_square_tiles_hold_every_sum_in_registers(form, even):
    ptx, log = compiled(SQUARE, form, even)
    check(ptx, log, form, ["wgmma.mma_async.sync.aligned.m64n128k16", "cp.async.bulk.tensor"])
    check_additions(ptx, 64, form)


@pytest.mark.parametrize("form", ["one", "cut", "sequential", "pairs"])
def test_wide_tiles_keep_products_under_way(form):
    ptx, log = compiled(WIDE, form)
    wanted = ["wgmma.mma_async.sync.aligned.m64n256k16", "cp.async.bulk.tensor"]
    check(ptx, log, form, wanted, spills_allowed=ADDRESSES if form == "pairs" else 0)
    check_additions(ptx, 128, form)


def check_additions(ptx, values, form):
    """Two groups of warps have `values` a thread each; what a leaf adds stands in the code."""
    found = len(re.findall(r"\badd(?:\.rn)?\.f32\b", ptx))
    assert found == 2 * values * FORMS[form][3], (form, found)
    assert "wgmma.wait_group.sync.aligned 1;" in ptx, "a step's products wait for themselves"
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    if granted:  # Triton 3.6 moves registers from the fetching warp to those that compute
        assert granted.count(240) >= 2 and min(granted) == 24, granted
    assert "steps" in fold_by_trades.do_not_specialize


def test_what_has_no_kernel_does_not_fit():
    pairs, tree = RootForm(1, 4, 1, 2), RootForm(1, 2, 2, 2)
    assert gluon_fits(pairs, 4096, 512, SQUARE) and gluon_fits(tree, 4096, 512, SQUARE)
    assert gluon_fits(pairs, 4096, 512, WIDE) and gluon_fits(pairs, 272, 512, SQUARE)
    for form, n, k, variant in (
        (tree, 4096, 512, WIDE), (pairs, 272, 512, WIDE), (pairs, 4096, 528, SQUARE),
        (pairs, 4096, 512, Variant(64, 128, 64, 4, 6)), (pairs, 4096, 512, SQUARE.at(16)),
    ):  # fmt: skip
        assert not gluon_fits(form, n, k, variant)


def test_the_emulated_kernel_keeps_its_bits():
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_gluon_gemm"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    failures = json.loads(done.stdout.splitlines()[-1])
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
