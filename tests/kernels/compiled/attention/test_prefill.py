"""Warp-specialised prefill attention, compiled for Hopper without a GPU, run elsewhere.

The cases that run stand in
`tests/kernels/interpreted/attention/test_prefill.py`.
"""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.attention.test_attention import NAMES, check, operand_types
from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.attention import attend
from tpdet.kernels.cuda.attention.operands import AttentionShape
from tpdet.kernels.cuda.attention.prefill_warp_specialised import attend_warp_specialised
from tpdet.kernels.cuda.attention.variants import AttentionVariant, prefill_variant
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

SPECIALISED = AttentionVariant(128, 4, 5, True, warp_specialised=True)
SPILLED = 360  # bytes, of which the loop over whole splits reads three words


def compiled_attention(dtype, group, window, stages):
    """PTX and the log of ptxas -v for compute capability 9.0."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    name = NAMES[dtype]
    tiles = f"tensordesc<{name}[64,128],{NVMMASharedLayout(128, 16, 2)!r}>"
    types = {"operands": operand_types(dtype), "k_tiles": tiles, "v_tiles": tiles}
    types |= dict.fromkeys(("blocks", "rows", "tables"), "*i32")
    types |= dict.fromkeys(("items", "widest", "window"), "i32")
    shape = AttentionShape(8, group, 128, 128, window, False)
    constants = {"SHAPE": shape, "BLOCK": 128, "STAGES": stages}
    aligned = ("operands", "blocks", "rows", "tables")
    done = hopper_kernel(attend_warp_specialised, types, constants, aligned, {"num_warps": 4})
    return done.ptx, done.log


@pytest.mark.parametrize(
    ("dtype", "group", "window"),
    some_slow(
        [(torch.bfloat16, 4, False)],
        [(torch.bfloat16, 4, False), (torch.bfloat16, 1, True), (torch.float16, 7, True)],
    ),
)
def test_products_run_while_a_consumer_takes_exponentials(dtype, group, window):
    ptx, log = compiled_attention(dtype, group, window, SPECIALISED.stages)
    check(ptx, log, SPILLED)
    assert "ex2.approx.ftz.f32" in ptx and "ex2.approx.f32" not in ptx
    assert "div.rn.f32" in ptx and "cp.async.bulk.tensor" in ptx
    assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", ptx), "`+ 0.0` is gone"
    assert "wgmma.mma_async.sync.aligned.m64n8k16" in ptx and "mma.sync" not in ptx
    # A consumer waits for scores while the products p . v behind them still run.
    assert "wgmma.wait_group.sync.aligned 2;" in ptx
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", ptx)]
    if granted:  # Triton 3.6 moves registers from the producer to the consumers
        assert max(granted) >= 232 and min(granted) <= 40, granted


def test_the_table_takes_the_warp_specialised_kernel_where_it_exists():
    for dtype, head, capability, specialised in (
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
        assert variant.warp_specialised == specialised
        assert variant.descriptors == (capability >= 9 and dtype != torch.float32)


@pytest.mark.parametrize("other", [{"rows": 64}, {"warps": 8}, {"stages": 2}])
def test_a_warp_specialised_variant_of_another_form_cannot_be_made(other):
    with pytest.raises(ValueError, match="has 128 rows, 4 warps and 3 stages or more"):
        replace(SPECIALISED, **other)


@pytest.mark.parametrize(("dtype", "head"), [(torch.float16, 96), (torch.float32, 128)])
def test_a_head_or_type_without_a_kernel_is_refused(dtype, head):
    q, pages = (torch.zeros(*shape, dtype=dtype) for shape in ((20, 2, head), (1, 2, 256, head)))
    batch = make_batch((PagedSequence(0, 20, 0, (0,)),), short_tokens=0)
    with pytest.raises(ValueError, match=f"{dtype} heads of {head}: it has heads of 128"):
        attend(q, pages, pages, batch, None, SPECIALISED, AttentionVariant(16, 4, 1))
