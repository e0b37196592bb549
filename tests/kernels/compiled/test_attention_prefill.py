"""Prefill attention by groups of warps, without a GPU: compiled for Hopper here, run elsewhere.

The cases that run stand in
`tests/kernels/interpreted/test_attention_prefill.py`.
"""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.test_attention import NAMES, check
from tests.kernels.compiled.test_gemm import assemble
from tpdet.kernels.cuda.attention.attention import attend
from tpdet.kernels.cuda.attention.prefill_warp_specialised import attend_groups
from tpdet.kernels.cuda.attention.variants import Variant, prefill_variant
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

GROUPS = Variant(128, 4, 5, True, groups=True)
SPILLED = 360  # bytes, of which the loop over whole splits reads three words


def compiled_groups(dtype, group, window, stages):
    """PTX and the log of ptxas -v for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    name = NAMES[dtype]
    tiles = f"tensordesc<{name}[64,128],{NVMMASharedLayout(128, 16, 2)!r}>"
    types = {"q": f"*{name}", "k_tiles": tiles, "v_tiles": tiles, "out": f"*{name}"}
    types |= dict.fromkeys(("blocks", "rows", "tables"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("items", "q_stride", "widest", "window"), "i32")
    constants = {"KEY_HEADS": 8, "GROUP": group, "HEAD": 128, "WINDOW": window, "BLOCK": 128}
    names = attend_groups.arg_names
    aligned = [n for n, t in types.items() if t.startswith("*")]
    source = GluonASTSource(
        fn=attend_groups,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs=constants | {"STAGES": stages},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx, assemble(ptx)


@pytest.mark.parametrize(
    ("dtype", "group", "window"),
    [
        (torch.bfloat16, 4, False),
        (torch.bfloat16, 1, True),
        (torch.float16, 7, True),
    ],
)
def test_groups_keep_products_under_way_while_they_take_exponentials(dtype, group, window):
    ptx, log = compiled_groups(dtype, group, window, GROUPS.stages)
    check(ptx, log, SPILLED)
    assert "ex2.approx.ftz.f32" in ptx and "ex2.approx.f32" not in ptx
    assert "div.rn.f32" in ptx and "cp.async.bulk.tensor" in ptx
    assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", ptx), "`+ 0.0` is gone"
    assert "wgmma.mma_async.sync.aligned.m64n8k16" in ptx and "mma.sync" not in ptx
    # A group's scores are waited for with the products p . v behind them still under way.
    assert "wgmma.wait_group.sync.aligned 2;" in ptx
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", ptx)]
    if granted:  # Triton 3.6 moves registers from the fetching warps to those that compute
        assert max(granted) >= 232 and min(granted) <= 40, granted


def test_the_table_takes_groups_where_they_exist():
    for dtype, head, capability, groups in (
        (torch.bfloat16, 128, 9, True),
        (torch.float16, 128, 9, True),
        (torch.bfloat16, 128, 8, False),
        (torch.bfloat16, 128, 10, False),
        (torch.bfloat16, 64, 9, False),
        (torch.bfloat16, 256, 9, False),
        (torch.float32, 128, 9, False),
    ):
        gpu = replace(H200, capability=(capability, 0))
        variant = prefill_variant(dtype, head, gpu)
        assert variant.groups == groups
        assert variant.descriptors == (capability >= 9 and dtype != torch.float32)


@pytest.mark.parametrize("other", [{"rows": 64}, {"warps": 8}, {"stages": 2}])
def test_groups_of_another_form_cannot_be_made(other):
    with pytest.raises(ValueError, match="they have 128 rows, 4 warps, 3 places or more"):
        replace(GROUPS, **other)


@pytest.mark.parametrize(("dtype", "head"), [(torch.float16, 96), (torch.float32, 128)])
def test_groups_without_a_kernel_are_refused(dtype, head):
    q, pages = (torch.zeros(*shape, dtype=dtype) for shape in ((20, 2, head), (1, 2, 256, head)))
    batch = make_batch((PagedSequence(0, 20, 0, (0,)),), short_tokens=0)
    with pytest.raises(ValueError, match=f"{dtype} heads of {head}: they have heads of 128"):
        attend(q, pages, pages, batch, None, GROUPS, Variant(16, 4, 1))
