"""The GPU's attention-side kernels without a GPU: compiled for Hopper."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.test_gemm import compile_for_hopper
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.operands import AttentionOperands, AttentionShape
from tpdet.kernels.cuda.attention.prefill import PrefillForm, attend_blocks
from tpdet.kernels.cuda.attention.split import score_cap
from tpdet.kernels.cuda.attention.variants import AttentionVariant, prefill_variant
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import embedding, norm, rotary
from tpdet.kernels.cuda.pointwise.soft_cap import cap_values

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Bytes a thread: dots of fp32 hold a whole depth in registers, and run where speed is no aim.
SPILL_ALLOWANCE = {"fp32": 4096, "bf16": 160, "fp16": 160}


def operand_types(dtype, fp8=False):
    """Triton's types of `AttentionOperands`, or over pages in fp8; sinks are read as fp32."""
    values = f"*{NAMES[dtype]}"
    pages = "*u8" if fp8 else values
    return AttentionOperands(values, pages, pages, values, "*fp32", "i32", "fp32")


def compiled(dtype, head, group, window, variant, cap=None, sinks=False):
    """`attend_blocks` of 8 key heads."""
    lanes = 1 << (head - 1).bit_length()
    name = NAMES[dtype]
    types = {"operands": operand_types(dtype)} | dict.fromkeys(("widest", "window"), "i32")
    types |= dict.fromkeys(("blocks", "rows", "tables"), "*i32")
    tiles = f"tensordesc<{name}[64,{lanes}]>" if variant.descriptors else f"*{name}"
    types |= dict.fromkeys(("k_tiles", "v_tiles"), tiles)
    constants = {
        "SHAPE": AttentionShape(8, group, head, lanes, window, sinks),
        "FORM": PrefillForm(variant.descriptors, 128, variant.rows, variant.stages),
        "CAP": cap,
    }
    return compile_for_hopper(attend_blocks, types, constants, variant.warps, variant.stages)


def fuses_exponents_alone(ptx):
    """Whether the fused multiply-adds are those that Rule 7 names: the arguments of exp2."""
    fused = set(re.findall(r"fma\.rn(?:\.ftz)?\.f(?:32|64)\s+(%\w+),", ptx))
    return fused <= set(re.findall(r"ex2\.approx\.ftz\.f32\s+%\w+, (%\w+)", ptx))


def check(ptx, log, allowance, fused_allowed=False):
    assert not re.search(r"(?<![a-z])(atom|red)\.", ptx), "an atomic"
    assert fused_allowed or fuses_exponents_alone(ptx)
    assert "serialized" not in log and "C7515" not in log, log
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= allowance, log


BEFORE_HOPPER = replace(H200, capability=(8, 0))
PREFILL_CASES = [
    (torch.bfloat16, 128, 4, False, AttentionVariant(64, 4, 3, True)),
    (torch.bfloat16, 128, 4, False, prefill_variant(torch.bfloat16, 128, BEFORE_HOPPER)),
    (torch.bfloat16, 128, 4, True, AttentionVariant(64, 4, 3, True)),
    (torch.bfloat16, 128, 4, False, AttentionVariant(128, 8, 2, True)),
    (torch.bfloat16, 256, 2, False, prefill_variant(torch.bfloat16, 256, H200)),
    (torch.bfloat16, 64, 7, False, AttentionVariant(64, 4, 3, True)),
    (torch.float16, 96, 1, False, prefill_variant(torch.float16, 96, H200)),
    (torch.float32, 128, 4, False, prefill_variant(torch.float32, 128, H200)),
]


QUICK = [PREFILL_CASES[i] for i in (0, 1, 4, 7)]


@pytest.mark.parametrize(
    ("dtype", "head", "group", "window", "variant"), some_slow(QUICK, PREFILL_CASES)
)
def test_prefill_compiles_without_serialised_matrix_instructions(
    dtype, head, group, window, variant
):
    ptx, log = compiled(dtype, head, group, window, variant)
    wide = dtype == torch.float32
    allowance = 0 if variant.descriptors else SPILL_ALLOWANCE[NAMES[dtype]]
    check(ptx, log, allowance, fused_allowed=wide)
    assert ("mma" in ptx) != wide and ("wgmma.mma_async" in ptx) != wide
    assert ("cp.async.bulk.tensor" in ptx) == (variant.descriptors and not window)
    assert "div.rn.f32" in ptx and "ex2.approx" in ptx
    assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", ptx), "`+ 0.0` is gone"


@pytest.mark.parametrize("head", some_slow([256], [128, 256]))
def test_capped_scores_compile_without_fusion(head):
    variant = prefill_variant(torch.bfloat16, head, H200, plain=False)
    assert not variant.warp_specialised and variant.descriptors
    cap = score_cap(head, 50.0)
    ptx, log = compiled(torch.bfloat16, head, 2, False, variant, cap)
    check(ptx, log, 64 if head == 256 else 0)
    assert "wgmma.mma_async" in ptx and "div.full.f32" in ptx
    types, constants = {"x": "*fp32", "count": "i32"}, {"CAP": cap, "BLOCK": 1024}
    ptx, log = compile_for_hopper(cap_values, types, constants, 4, 3, ("count",))
    check(ptx, log, 0)
    assert "div.full.f32" in ptx and "ld.global.v4" in ptx


def test_sinks_compile_without_fusion():
    variant = prefill_variant(torch.bfloat16, 64, H200, plain=False)
    assert variant.descriptors
    for window in (False, True):
        ptx, log = compiled(torch.bfloat16, 64, 8, window, variant, sinks=True)
        check(ptx, log, 0)
        assert "wgmma.mma_async" in ptx


def test_the_copies_compile_without_fusion():
    types = dict.fromkeys(("x", "norm_weight", "out"), "*bf16")
    types |= {"cos": "*fp32", "sin": "*fp32", "x_stride": "i32"}
    constants = {"HEADS": 32, "HALF": 64, "LANES": 64, "NORM": True, "BLOCK": 8}
    constants["EPS_BITS"] = norm.eps_bits(1e-6)
    ptx, log = compile_for_hopper(rotary._rotate, types, constants, 4, 3)
    check(ptx, log, 0)
    assert "div.rn.f64" in ptx and "sqrt.rn.f64" in ptx
    types = dict.fromkeys(("k", "v", "k_pages", "v_pages"), "*bf16") | {"slots": "*i64"}
    types |= {"k_stride": "i32", "v_stride": "i32"}
    constants = {"KEY_HEADS": 8, "HEAD": 128, "PAGE": 256, "BLOCK": 1024}
    check(*compile_for_hopper(embedding._store_rows, types, constants, 4, 3), 0)
    types = {"ids": "*i64", "table": "*bf16", "y": "*fp32", "last": "i32"}
    constants = {"H": 4096, "BLOCK": 2048}
    ptx, log = compile_for_hopper(embedding.widen_rows, types, constants, 4, 3)
    check(ptx, log, 0)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
