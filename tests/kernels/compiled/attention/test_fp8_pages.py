"""Attention over fp8 pages and the store of their rows, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import torch
import triton

from tests.kernels.compiled.attention.test_attention import operand_types
from tests.kernels.compiled.attention.test_decode import attention_types, check, compiled
from tests.kernels.compiled.attention.test_streamed import RESERVED, walks_all
from tests.kernels.compiled.attention.test_streamed import compiled as compiled_streamed
from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.kernels.compiled.test_gemm import compile_for_hopper
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.decode import attend_splits
from tpdet.kernels.cuda.attention.decode_launch import decode_form
from tpdet.kernels.cuda.attention.operands import AttentionShape
from tpdet.kernels.cuda.attention.prefill import PrefillForm, attend_blocks
from tpdet.kernels.cuda.attention.streamed import PROGRAMS
from tpdet.kernels.cuda.attention.variants import AttentionVariant, decode_variant, prefill_variant
from tpdet.kernels.cuda.hardware import H100, H200
from tpdet.kernels.cuda.pointwise import norm
from tpdet.kernels.cuda.pointwise.rotate_and_store import (
    MANY_ROWS,
    RotationForm,
    rotate_and_store_heads,
)

SPILLED = {128: 64, 256: 512}
SPILLED_STREAMED = 96
OTHER_ORDER = "kWidth = 4"
"""What Triton makes of 8-bit operands of narrow products: groups of 16 that are not in a row."""


def split_kernel(dtype, head, group, variant):
    lanes = triton.next_power_of_2(head)
    types = attention_types(dtype) | {"operands": operand_types(dtype, True)}
    del types["row_parts"]
    constants = {
        "SHAPE": AttentionShape(8, group, head, lanes, False, False),
        "FORM": decode_form(variant, group, lanes),
        "CAP": None,
        "row_parts": 1,
    }
    types = {name: kind for name, kind in types.items() if name in attend_splits.arg_names}
    aligned = [name for name, kind in types.items() if kind[0].startswith("*")]
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return hopper_kernel(attend_splits, types, constants, aligned, options)


@pytest.mark.parametrize(
    ("dtype", "head", "group"),
    some_slow(
        [(torch.bfloat16, 128, 4)],
        [(torch.bfloat16, 128, 4), (torch.float16, 64, 7), (torch.bfloat16, 256, 2)],
    ),
)
def test_decode_adds_in_the_order_of_numbers_and_flushes_nothing(dtype, head, group):
    variant = decode_variant(dtype, head, group, 64, 64, fp8=True)
    assert variant.swapped and not variant.streamed
    done = split_kernel(dtype, head, group, variant)
    check(done.ptx, done.log, counts=True)
    assert "wgmma.mma_async" in done.ptx and OTHER_ORDER not in done.ttgir
    assert not re.search(r"mul\.(rn\.)?ftz", done.ptx), "codes below the least normal one are lost"


@pytest.mark.slow
def test_narrow_products_would_add_in_another_order():
    done = split_kernel(torch.bfloat16, 128, 4, AttentionVariant(16, 4, 1, fused=True))
    assert OTHER_ORDER in done.ttgir


@pytest.mark.parametrize("head", some_slow([128], [64, 128, 256]))
def test_prompts_are_attended_to_by_wide_products(head):
    variant = prefill_variant(torch.bfloat16, head, H200, fp8=True)
    types = {"operands": operand_types(torch.bfloat16, True)}
    types |= dict.fromkeys(("widest", "window"), "i32")
    types |= dict.fromkeys(("blocks", "rows", "tables"), "*i32")
    types |= dict.fromkeys(("k_tiles", "v_tiles"), "*u8")
    constants = {
        "SHAPE": AttentionShape(8, 4, head, head, False, False),
        "FORM": PrefillForm(False, 128, variant.rows, variant.stages),
        "CAP": None,
    }
    stages = variant.warps, variant.stages
    ptx, log, *_ = compile_for_hopper(attend_blocks, types, constants, *stages)
    assert "wgmma.mma_async" in ptx and "serialized" not in log and "C7515" not in log
    spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    assert spilled <= SPILLED.get(head, 0)


@pytest.mark.parametrize(
    ("head", "group", "rows"),
    some_slow([(128, 4, 8)], [(128, 4, 8), (64, 7, 8), (128, 8, 16)]),
)
def test_streamed_codes_become_operands_in_registers(head, group, rows):
    stages = decode_variant(torch.bfloat16, head, rows, 512, 64, streams=True, fp8=True).stages
    done = compiled_streamed(torch.bfloat16, head, group, rows, stages, True)
    assert "serialized" not in done.log and "C7515" not in done.log, done.log
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in done.ptx and "mma.sync" not in done.ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in done.ptx
    assert not re.search(r"mul\.(rn\.)?ftz", done.ptx)
    assert (
        max(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.log)) <= SPILLED_STREAMED
    )
    (limit,), (threads,) = (
        re.findall(rf"\.{name} (\d+)", done.ptx) for name in ("maxnreg", "reqntid")
    )
    assert PROGRAMS * int(limit) * int(threads) <= 1 << 16
    assert PROGRAMS * (done.shared + RESERVED) <= H100.shared_bytes + RESERVED
    assert walks_all(done.ttgir[done.ttgir.index("partition0") :])


def test_the_rotation_stores_codes_wide():
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    types |= {"norms": ("*bf16", "*bf16"), "pages": ("*u8", "*u8"), "tables": ("*fp32", "*fp32")}
    types |= {"positions": "*i64", "slots": "*i64", "strides": ("i32", "i32", "i32")}
    form = RotationForm(32, 8, 64, 64, True, norm.eps_bits(1e-6), MANY_ROWS.heads)
    kernel = rotate_and_store_heads, types, {"FORM": form}, MANY_ROWS.warps, 3
    ptx, log, _ = compiled(*kernel)
    check(ptx, log)
    assert "st.global.v2.b32" in ptx and not re.search(r"mul\.(rn\.)?ftz", ptx)
