"""Decode attention and the rotation that stores, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import torch
import triton

from tests.kernels.compiled.attention.test_attention import (
    NAMES,
    fuses_exponents_alone,
    operand_types,
)
from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.decode import SplitStates, attend_splits
from tpdet.kernels.cuda.attention.decode_launch import decode_form, merge_chunk
from tpdet.kernels.cuda.attention.merge_splits import merge_splits
from tpdet.kernels.cuda.attention.operands import AttentionShape
from tpdet.kernels.cuda.attention.split import score_cap
from tpdet.kernels.cuda.attention.variants import AttentionVariant, decode_variant
from tpdet.kernels.cuda.pointwise import norm
from tpdet.kernels.cuda.pointwise.rotate_and_store import (
    FEW_ROWS,
    MANY_ROWS,
    RotationForm,
    rotate_and_store_heads,
)

# Bytes a thread: dots of fp32 hold a whole depth in registers, and run where speed is no aim.
# Heads of 256 with a window spill 16 bytes under Triton 3.9 and none under 3.6.
SPILL_ALLOWANCE = {True: 4096, False: 16}
STATES = SplitStates("*fp32", "*fp32", "*fp32")


def compiled(kernel, types, constants, warps, stages):
    """PTX, log of ptxas -v and shared bytes for compute capability 9.0; row strides of 16."""
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    aligned = [n for n, kind in types.items() if kind[0].startswith("*") or n == "strides"]
    options = {"num_warps": warps, "num_stages": stages}
    done = hopper_kernel(kernel, types, constants, aligned, options)
    return done.ptx, done.log, done.shared


def attention_types(dtype):
    types = {"operands": operand_types(dtype), "states": STATES, "out": f"*{NAMES[dtype]}"}
    types |= dict.fromkeys(("rows", "tables", "splits", "short", "arrivals"), "*i32")
    types["sinks"] = "*fp32"
    return types | dict.fromkeys(
        ("widest", "window", "row_count", "row_parts", "short_rows"), "i32"
    )


def check(ptx, log, wide=False, counts=False):
    """No float atomic, no fusion, nothing serialised or spilled beyond the allowance."""
    atomics = set(re.findall(r"(?<![a-z])(?:atom|red)\.[\w.]+", ptx))
    assert atomics == ({"atom.global.gpu.acq_rel.add.u32"} if counts else set())
    assert wide or fuses_exponents_alone(ptx)
    assert "serialized" not in log and "C7515" not in log, log
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= SPILL_ALLOWANCE[wide], log


CASES = [  # dtype, head, group, window, rows of a sequence, splits of 4 sequences
    (torch.bfloat16, 128, 4, False, 1, 4),
    (torch.bfloat16, 128, 4, True, 1, 32),
    (torch.bfloat16, 128, 4, False, 1, 1024),
    (torch.bfloat16, 128, 8, False, 8, 4),
    (torch.bfloat16, 128, 8, False, 8, 64),
    (torch.bfloat16, 256, 2, False, 1, 4),
    (torch.bfloat16, 256, 4, True, 16, 64),
    (torch.float16, 96, 3, False, 5, 8),
    (torch.float16, 64, 7, False, 1, 4),
    (torch.float32, 64, 4, True, 1, 4),
]


MERGES = [(128, 500, False), (128, 1, False), (96, 60, False), (256, 500, False), (64, 500, True)]
PLAIN = [(*case, 0.0, False) for case in CASES]
CAPPED, SINKS = (*CASES[5], 50.0, False), (torch.bfloat16, 64, 8, True, 1, 4, 0.0, True)


@pytest.mark.parametrize(
    ("dtype", "head", "group", "window", "tokens", "splits", "cap", "sinks"),
    some_slow([*(PLAIN[i] for i in (0, 6, 9)), CAPPED, SINKS], [*PLAIN, CAPPED, SINKS]),
)
def test_splits_compile_to_matrix_instructions(
    dtype, head, group, window, tokens, splits, cap, sinks
):
    variant = decode_variant(dtype, head, tokens * group, splits, 4)
    assert variant.fused == (splits <= 128 and head * tokens <= 2048)
    assert variant.swapped == (dtype != torch.float32)
    lanes = triton.next_power_of_2(head)
    constants = {
        "SHAPE": AttentionShape(8, group, head, lanes, window, sinks),
        "FORM": decode_form(variant, tokens * group, lanes),
        "CAP": score_cap(head, cap),
    }
    types = attention_types(dtype)
    if tokens * group <= variant.rows:
        del types["row_parts"]
        constants["row_parts"] = 1
    ptx, log, _ = compiled(attend_splits, types, constants, variant.warps, variant.stages)
    wide = dtype == torch.float32
    check(ptx, log, wide, variant.fused)
    assert ("wgmma.mma_async" in ptx) != wide and "tf32" not in ptx
    assert ("cp.async.c" in ptx) == (variant.stages > 1)
    if variant.fused:
        assert "div.rn.f32" in ptx
        assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", ptx), "`+ 0.0` is gone"
        added = ptx.index("atom.global.gpu.acq_rel")
        assert "bar.sync" in ptx[ptx.rindex("st.global", 0, added) : added], "no barrier"


@pytest.mark.parametrize(
    ("head", "splits", "sinks", "window"),
    some_slow(
        [(128, 500, False, False), (96, 60, False, False), (64, 500, True, True)],
        [(*case, window) for case in MERGES for window in (False, True)],
    ),
)
def test_the_merge_loads_a_chunk_at_once_and_fuses_nothing(head, splits, sinks, window):
    lanes = triton.next_power_of_2(head)
    chunk = merge_chunk(splits, lanes)
    constants = {"SHAPE": AttentionShape(8, 4, head, lanes, window, sinks), "CHUNK": chunk}
    ptx, log, _ = compiled(merge_splits, attention_types(torch.bfloat16), constants, 4, 3)
    check(ptx, log)
    assert "div.rn.f32" in ptx
    assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", ptx), "`+ 0.0` is gone"
    # All of a chunk's values are asked for before the first of them waits in shared memory.
    values = re.search(r"st\.shared\.v4", ptx).start()
    wide = re.findall(r"ld\.global\.v4\.b32", ptx[:values])
    assert len(wide) == chunk * lanes // (128 * 4), (len(wide), chunk, lanes)


@pytest.mark.parametrize("head", [128, 96])
@pytest.mark.parametrize("normed", some_slow([True], [True, False]))
@pytest.mark.parametrize("share", [FEW_ROWS, MANY_ROWS])
def test_the_rotation_loads_wide_and_fuses_nothing(share, normed, head):
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    types |= dict.fromkeys(("norms", "pages"), ("*bf16", "*bf16"))
    types |= {"tables": ("*fp32", "*fp32"), "positions": "*i64", "slots": "*i64"}
    types["strides"] = ("i32", "i32", "i32")
    form = RotationForm(32, 8, head // 2, 64, normed, norm.eps_bits(1e-6), share.heads)
    ptx, log, _ = compiled(rotate_and_store_heads, types, {"FORM": form}, share.warps, 3)
    check(ptx, log)
    assert ("sqrt.rn.f64" in ptx) == normed and ("div.rn.f64" in ptx) == normed
    if share is MANY_ROWS and head == 128:
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx


def test_variants_depend_on_shapes_that_a_captured_graph_fixes():
    for splits, sequences, key_heads, stages, fused in (
        (16, 16, 8, 3, True),
        (32, 1, 8, 3, False),
        (64, 64, 8, 1, True),
        (64, 64, 4, 3, True),
        (256, 256, 8, 2, True),
        (256, 16, 8, 2, True),
        (512, 16, 8, 2, False),
        (129, 1, 8, 2, False),
    ):
        wanted = AttentionVariant(16, 4, stages, fused=fused, swapped=True)
        assert decode_variant(torch.bfloat16, 128, 4, splits, sequences, key_heads) == wanted
    assert decode_variant(torch.bfloat16, 128, 64, 64, 16).rows == 32
    assert decode_variant(torch.bfloat16, 128, 64, 4, 1).rows == 16
