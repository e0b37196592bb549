"""The kernels that sample many rows, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.kernels.compiled.test_gemm import compile_for_hopper
from tpdet.kernels.cuda.sampling import answers, candidates, peaks, processed, ranks, search, window
from tpdet.kernels.cuda.sampling.candidates import Bounds
from tpdet.kernels.cuda.sampling.peaks import LogitRows, RowShape
from tpdet.kernels.cuda.sampling.window import WindowRoom
from tpdet.kernels.inputs.sampled_rows import PackedRows, RowAnswers

TYPES = {
    "rows": LogitRows("*fp32", "*fp32", "*i64", "*i64", "*i64", "*i64", "*i32"),
    "shape": RowShape("i32", "i32", "i32"),
    **dict.fromkeys(("height", "peak_parts", "ranks", "first_id"), "i32"),
    "filters": Bounds("*i64", "*i64"),
    "logits": "*fp32", "groups": "*i64",
    "lists": "*i64", "counts": "*i32", "windows": "*i64", "digits": "*i64",
    "room": WindowRoom("*i64", "*i64", "*i32"), "parts": "i32",
    "partials": "*i64", "gathered": "*i64",
    "into": RowAnswers("*fp64", "*fp32"),
}  # fmt: skip
PACKED = {
    "answers": "*fp64", "places": "*i64", "into": PackedRows("*i64", "*fp32", "*i1", "*fp64"),
    "rows": "i32", "share": "i32", "length": "i32",
}  # fmt: skip
SCANNED = {"SPAN": 4096, "PER_PART": 64}
SUMMED = {"SPAN": 4096, "PARTS": 128, "OWN": 128}
FILTERED = {"PARTS": 128, "WHOLE": False}
KERNELS = {
    "peaks": (peaks.scan_peaks, TYPES, SCANNED, 4),
    "masses": (
        answers.sum_rows, TYPES,
        SUMMED | {"RANDOM_ROWS": False, "WHOLE": False, "LISTED": False}, 4,
    ),
    "samples": (
        answers.sum_rows, TYPES,
        SUMMED | {"RANDOM_ROWS": True, "WHOLE": True, "LISTED": True}, 4,
    ),
    "answers": (answers.answer_rows, TYPES, {"RANKS": 8}, 1),
    "processed": (
        processed.write_processed,
        TYPES | {"bounds": "*i64", "answers": "*fp64", "into": TYPES["rows"]},
        {"SPAN": 4096, "PARTS": 128}, 4,
    ),
    "packed": (answers.pack_rows, PACKED, {"PLACED": True}, 4),
    "groups": (peaks.scan_groups, TYPES, SCANNED, 4),
    "floor": (candidates.choose_floor, TYPES, FILTERED | {"GROUPS": 4096}, 8),
    "list": (candidates.list_candidates, TYPES, FILTERED, 4),
    "top": (candidates.bound_candidates, TYPES, FILTERED | {"GROUPS": 4096}, 16),
    "count": (window.count_buckets, TYPES, FILTERED, 16),
    "collect": (window.collect_window, TYPES, FILTERED, 8),
    "rest": (
        search.bound_fallbacks, TYPES,
        FILTERED | {"ROW_PARTS": 64, "BY_WINDOW": True, "BY_DIGITS": True}, 16,
    ),
}  # fmt: skip
FUSED = ("samples", "top")  # the fp64 logarithm is a sequence of fma's that asks for them


def compiled(kernel, types, constants, warps, stages=3):
    """PTX and the log of ptxas -v for compute capability 9.0."""
    aligned = [name for name, kind in types.items() if (kind if "*" in kind else kind[0])[0] == "*"]
    options = {"num_warps": warps, "num_stages": stages}
    done = hopper_kernel(kernel, types, constants, aligned, options)
    return done.ptx, done.log


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_compiles_without_float_atomics_fusion_or_spills(name):
    kernel, types, constants, warps = KERNELS[name]
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ptx, log = compiled(kernel, types, constants, warps)
    atomics = re.findall(r"(?<![a-z])(?:atom|red)\.[a-z0-9.:_]+", ptx)
    assert all(re.search(r"\.[us](32|64)$", atomic) for atomic in atomics), atomics
    assert not atomics or name in ("count", "collect", "list", "rest", "masses", "samples"), atomics
    assert name in FUSED or not re.search(r"fma\.rn\.f(32|64)", ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) == 0, log


RANK_KERNELS = {
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


@pytest.mark.parametrize("name", sorted(RANK_KERNELS))
def test_the_kernels_of_ranks_compile_without_atomics_fusion_or_spills(name):
    kernel, types, constants, warps = RANK_KERNELS[name]
    ptx, log = compile_for_hopper(kernel, types, constants, warps, 3)
    assert not re.search(r"(?<![a-z])(atom|red)\.", ptx), "an atomic"
    assert not re.search(r"fma\.rn\.f(32|64)", ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) == 0, log
