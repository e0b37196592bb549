"""Leaves folded by warps of several trades: compiled for Hopper, emulated in a subprocess."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.test_triton_gemm import ROOT, assemble, check
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.gluon_leaf_gemm import fold_by_trades, run_gluon_fold
from tpdet.kernels.cuda.leaf_variants import SHARED_MEMORY
from tpdet.kernels.cuda.root_form import RootForm

FORMS = {  # GROUPS, PARTS, PAIR; additions a value, in the code
    "cut": (2, 1, 1, 1), "sequential": (8, 1, 1, 1), "pairs": (4, 1, 2, 2), "tree": (2, 2, 2, 3),
}  # fmt: skip
TILE = Variant(128, 128, 64, 4, 6, descriptor=True)


def compiled(form, even=True, stages=TILE.stages):
    """PTX, the log of ptxas -v and bytes of shared memory for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(128, 16, 2)
    types = {
        "x_tiles": f"tensordesc<bf16[64,64],{layout!r}>",
        "w_tiles": f"tensordesc<bf16[128,64],{layout!r}>",
        "y": "*fp32",
    } | dict.fromkeys(("m", "n", "roots", "steps"), "i32")  # fmt: skip
    groups, parts, pair, _ = FORMS[form]
    names = fold_by_trades.arg_names
    source = GluonASTSource(
        fn=fold_by_trades,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={
            "BK": 64, "GROUPS": groups, "PARTS": parts, "PAIR": pair, "EVEN": even,
            "STAGES": stages,
        },
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("y", "n")},
    )  # fmt: skip
    options = {"num_warps": 4, "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return done.asm["ptx"], assemble(done.asm["ptx"]), done.metadata.shared


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_sum_stays_in_registers(form, even):
    ptx, log, _ = compiled(form, even)
    check(ptx, log, form, ["wgmma.mma_async.sync.aligned.m64n128k16", "cp.async.bulk.tensor"])
    # Two groups of warps have 64 values a thread each; what a leaf adds stands in the code.
    found = len(re.findall(r"\badd(?:\.rn)?\.f32\b", ptx))
    assert found == 2 * 64 * FORMS[form][3], (form, found)
    assert "wgmma.wait_group.sync.aligned 1;" in ptx, "a step's products wait for themselves"
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    if granted:  # Triton 3.6 moves registers from the fetching warp to those that compute
        assert granted.count(240) >= 2 and min(granted) == 24, granted
    assert "steps" in fold_by_trades.do_not_specialize


def test_seven_stages_are_the_most_that_fit():
    assert compiled("tree", stages=7)[2] <= SHARED_MEMORY < compiled("tree", stages=8)[2]


@pytest.mark.parametrize(
    ("k", "variant", "sms", "dtype"),
    [
        (512, replace(TILE, columns=256), 132, torch.bfloat16),
        (512, replace(TILE, rows=64), 132, torch.bfloat16),
        (512, replace(TILE, depth=32), 132, torch.bfloat16),
        (512, replace(TILE, swap=True), 132, torch.bfloat16),
        (528, TILE, 132, torch.bfloat16),
        (64, TILE, 132, torch.bfloat16),
        (512, TILE, 0, torch.bfloat16),
        (512, TILE, 132, torch.float32),
    ],
)
def test_what_does_not_fit_is_refused(k, variant, sms, dtype):
    x, w, y = torch.empty(2, 2 * k, dtype=dtype), torch.empty(2, 8, k, dtype=dtype), torch.empty(0)
    with pytest.raises(ValueError, match="gluon"):
        run_gluon_fold(x, w, y, RootForm(1, 1, 1, 2), variant, sms)


def test_the_emulated_kernel_keeps_its_bits():
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_gluon_gemm"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    failures = json.loads(done.stdout.splitlines()[-1])
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
