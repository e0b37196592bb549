"""The GPU's sampler without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.test_gemm import compile_for_hopper
from tpdet.kernels.cuda.sampling import ranks

KERNELS = {
    "rank": (
        ranks.count_parts,
        {"logits": "*fp32", "chosen": "*fp32", "at": "*i64", "parts": "*i32", "width": "i32",
         "stride": "i32"},
        {}, 4,
    ),
    "top": (
        ranks.top_of_parts,
        {"values": "*fp32", "tops": "*i64", "vocabulary": "i32", "stride": "i32", "count": "i32"},
        {}, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_compiles_without_atomics_fusion_or_spills(name):
    kernel, types, constants, warps = KERNELS[name]
    ptx, log = compile_for_hopper(kernel, types, constants, warps, 3)
    assert not re.search(r"(?<![a-z])(atom|red)\.", ptx), "an atomic"
    assert not re.search(r"fma\.rn\.f(32|64)", ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) == 0, log
