"""The kernels that sample many rows, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.test_gemm import compile_for_hopper
from tpdet.kernels.cuda.sampling import (
    candidate_list,
    fallback_bounds,
    row_answers,
    row_peaks,
    value_window,
)

ROW = {"logits": "*fp32", "copies": "*fp32", "table": "*i64", "peaks": "*i64"}
SHAPE = {"rows": "i32", "width": "i32", "stride": "i32", "peak_parts": "i32"}
TOP = {"slots": "*i64", "lists": "*i64", "states": "*i64", "bounds": "*i64"}
LISTS = TOP | {"windows": "*i64", "counts": "*i32", "run_parts": "*i32"}
SIZES = {"PARTS": 128}
ANSWERS = {
    "bounds": "*i64", "states": "*i64", "partials": "*i64", "arrivals": "*i32", "gathered": "*i64",
    "answers": "*fp64", "maxima": "*fp32", "first_id": "i32",
}  # fmt: skip
KERNELS = {
    "peaks": (
        row_peaks.scan_peaks, ROW | SHAPE | ANSWERS | {"groups": "*i64"},
        {"SPAN": 4096, "BLOCK": 2048, "PER_PART": 64}, 4,
    ),
    "masses": (
        row_answers.weigh_rows, ROW | SHAPE | ANSWERS,
        SIZES | {"SPAN": 4096, "BLOCK": 2048, "SCORED": 1024, "OWN": 128, "RANDOM_ROWS": False,
                 "WHOLE": False, "LISTED": False}, 4,
    ),
    "samples": (
        row_answers.weigh_rows, ROW | SHAPE | ANSWERS,
        SIZES | {"SPAN": 4096, "BLOCK": 2048, "SCORED": 1024, "OWN": 128, "RANDOM_ROWS": True,
                 "WHOLE": True, "LISTED": True}, 4,
    ),
    "answers": (
        row_answers.answer_rows, ROW | SHAPE | ANSWERS | {"ranks": "i32"},
        {"RANKS": 8}, 1,
    ),
    "packed": (
        row_answers.pack_rows,
        ANSWERS | {"places": "*i64", "tokens": "*i64", "fits": "*i1", "logprobs": "*fp32",
                   "packed": "*fp64", "rows": "i32", "share": "i32", "length": "i32"},
        {"BLOCK": 128, "PLACED": True}, 4,
    ),
    "groups": (
        row_peaks.scan_groups, ROW | SHAPE | {"groups": "*i64"},
        {"SPAN": 4096, "BLOCK": 2048, "PER_PART": 64}, 4,
    ),
    "floor": (
        candidate_list.choose_floor,
        ROW | SHAPE | TOP | {"groups": "*i64", "counts": "*i32", "used": "i32"},
        SIZES | {"WHOLE": False, "GROUPS": 4096}, 8,
    ),
    "list": (
        candidate_list.list_candidates, ROW | SHAPE | TOP,
        SIZES | {"WHOLE": False, "BLOCK": 1024}, 4,
    ),
    "top": (
        candidate_list.bound_candidates, ROW | SHAPE | TOP | {"groups": "*i64", "used": "i32"},
        SIZES | {"WHOLE": False, "GROUPS": 4096}, 16,
    ),
    "count": (
        value_window.count_buckets, ROW | SHAPE | LISTS,
        SIZES | {"WHOLE": False, "BLOCK": 8192}, 16,
    ),
    "collect": (
        value_window.collect_window, ROW | SHAPE | LISTS,
        SIZES | {"WHOLE": False, "BLOCK": 4096}, 8,
    ),
    "rest": (
        fallback_bounds.bound_fallbacks, ROW | SHAPE | LISTS | {"parts": "i32", "digits": "*i64"},
        SIZES | {"WHOLE": False, "BLOCK": 4096, "ROW_PARTS": 64, "ROW_BLOCK": 2048,
                 "BY_WINDOW": True, "BY_DIGITS": True}, 16,
    ),
}  # fmt: skip
FUSED = ("samples", "top")  # the fp64 logarithm is a sequence of fma's that asks for them


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_compiles_without_float_atomics_fusion_or_spills(name):
    kernel, types, constants, warps = KERNELS[name]
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ptx, log = compile_for_hopper(kernel, types, constants, warps, 3)
    atomics = re.findall(r"(?<![a-z])(?:atom|red)\.[a-z0-9.:_]+", ptx)
    assert all(re.search(r"\.[us](32|64)$", atomic) for atomic in atomics), atomics
    assert not atomics or name in ("count", "collect", "list", "rest", "masses", "samples"), atomics
    assert name in FUSED or not re.search(r"fma\.rn\.f(32|64)", ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) == 0, log
