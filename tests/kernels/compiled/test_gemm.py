"""The GPU's GEMM-side kernels without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.cost.static import static_tiles
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants import descriptor as gemm_descriptor
from tpdet.kernels.cuda.gemm.variants import pointer as gemm_pointer
from tpdet.kernels.cuda.gemm.variants.form import ChainForm
from tpdet.kernels.cuda.pointwise import activation, finish, fold, norm
from tpdet.kernels.cuda.pointwise.finish import StreamRows, finish_rule
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.norm import Finish, Norm

SIZES = "n", "k", "stride_x"
of_some_tiles = pytest.mark.parametrize("every", some_slow([False], [False, True]))


def compile_for_hopper(kernel, types, constants, warps, stages, sizes=SIZES):
    """PTX and the log of ptxas -v for compute capability 9.0; sizes: multiples of 16."""
    aligned = [n for n, t in types.items() if t[0].startswith("*") or n in sizes]
    options = {"num_warps": warps, "num_stages": stages}
    done = hopper_kernel(kernel, types, constants, aligned, options)
    return done.ptx, done.log


def check(ptx, log, name, expected, fused_allowed=False, spills_allowed=0):
    for instruction in expected:
        assert instruction in ptx, f"{name}: no {instruction}"
    assert not re.search(r"(?<![a-z])(atom|red)\.", ptx), f"{name}: an atomic"
    if not fused_allowed:
        assert not re.search(r"fma\.rn\.f(32|64)", ptx), f"{name}: a fused multiply-add"
    assert "serialized" not in log and "C7515" not in log, log
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= spills_allowed, f"{name}: {log}"


def tiles_of(every, **asked):
    """All static tiles, or the largest of each variant."""
    tiles = sorted(static_tiles(**asked), key=lambda tile: tile.rows * tile.columns)
    return tiles if every else {tile.variant: tile for tile in tiles}.values()


def descriptor_types(variant, out, gated=False):
    width = variant.columns // variant.halves // (2 if gated else 1)
    block = f"[1,{variant.rows},{width}]"
    return {
        "x": f"tensordesc<bf16[{variant.rows},{variant.depth}]>",
        "w": f"tensordesc<bf16[{variant.columns},{variant.depth}]>",
        "y": f"tensordesc<{out}{block}>",
        "bias": "*bf16",
    } | dict.fromkeys(("m", "n", "k", "leaves"), "i32")


def form(tile, **more):
    """What the kernels of a chain are compiled for by a tile, as a launch has it."""
    sizes = tile.rows, tile.columns, tile.depth, tile.halves
    return ChainForm(*sizes, tile.variant.endswith("_swapped"), **more)


def pointer_types(dtype, out=None):
    types = dict.fromkeys(("x", "w", "bias"), f"*{dtype}") | {"y": f"*{out or dtype}"}
    return types | dict.fromkeys(("m", "n", "k", "stride_x"), "i32")


@of_some_tiles
@pytest.mark.parametrize("dtype", some_slow(["bf16", "fp32"], ["bf16", "fp16", "fp32"]))
def test_pointer_kernels_compile_to_matrix_instructions(dtype, every):
    float32 = dtype == "fp32"
    for tile in tiles_of(every, float32=float32, wide_out=False, descriptors=False):
        constants = {"FORM": form(tile, BIAS=True), "expert_ids": None}
        kernel = gemm_pointer.pointer_chain
        types = pointer_types(dtype)
        ptx, log = compile_for_hopper(kernel, types, constants, tile.warps, tile.stages)
        wanted = ["fma.rn.f32"] if float32 else ["wgmma.mma_async", "cp.async.cg.shared.global"]
        check(ptx, log, "pointer_chain", wanted, fused_allowed=float32)


@of_some_tiles
@pytest.mark.parametrize("out", some_slow(["bf16"], ["bf16", "fp32"]))
def test_descriptor_kernels_compile_without_serialised_matrix_instructions(out, every):
    wide = out == "fp32"
    for tile in tiles_of(every, float32=False, wide_out=wide, descriptors=True):
        if not variant_of(tile).descriptors:
            continue
        types, constants = descriptor_types(tile, out), {"FORM": form(tile, BIAS=not wide)}
        kernel = gemm_descriptor.descriptor_chain
        ptx, log = compile_for_hopper(kernel, types, constants, tile.warps, tile.stages)
        check(ptx, log, "descriptor_chain", ["wgmma.mma_async", "cp.async.bulk.tensor"])


@of_some_tiles
@pytest.mark.parametrize("float32", [False, True])
def test_kernels_of_unequal_leaves_compile_to_matrix_instructions(float32, every):
    """A leaf's steps are known then: two, three, and one."""
    dtype = "fp32" if float32 else "bf16"
    for tile in tiles_of(every, float32=float32, wide_out=True, descriptors=not float32):
        constants = {"FORM": form(tile, EDGES=(0, 2, 5, 6))}
        if variant_of(tile).descriptors:
            types, kernel = descriptor_types(tile, "fp32"), gemm_descriptor.descriptor_chain
            wanted = ["wgmma.mma_async", "cp.async.bulk.tensor"]
        else:
            types, kernel = pointer_types(dtype, "fp32"), gemm_pointer.pointer_chain
            constants["expert_ids"] = None
            wanted = ["wgmma.mma_async", "cp.async.cg.shared.global"]
        ptx, log = compile_for_hopper(kernel, types, constants, tile.warps, tile.stages)
        expected, spilled = (["fma.rn.f32"], 16) if float32 else (wanted, 0)
        check(ptx, log, kernel.__name__, expected, float32, spilled)


def test_elementwise_kernels_compile_without_fusion():
    types = {"operands": "*fp32", "y": "*fp32", "elements": "i32"}
    constants = {"PROGRAM": own_program((((0, 1), (2, 3)),)), "BLOCK": 512}
    check(*compile_for_hopper(fold.fold_planes, types, constants, 4, 3), "fold", ["add."])
    # Rows of a product, or what the library left unrounded.
    for read, number in (("bf16", 1), ("fp32", 1), ("fp32", 2)):
        types = {"gate_up": f"*{read}", "y": "*bf16", "width": "i32", "stride": "i32"}
        kernel = activation.activate_and_multiply_rows
        ptx, log = compile_for_hopper(
            kernel, types, {"BLOCK": 1024, "ACTIVATION": number}, 4, 3, ("width", "stride")
        )
        check(ptx, log, f"activation {number} of {read}", ["div.full.f32", "ex2.approx"])
        assert not re.search(r"div\.(rn|approx)\.f", ptx), "another division than in the epilogues"
        loads = re.findall(r"ld\.global[\w.]*", ptx)
        assert set(loads) == {"ld.global.v4.b32"}, "eights of gates are read in wide words"


STREAM = StreamRows("*fp32", "i32", "*bf16", "*bf16", "*fp32")
"""The stream is fp32; what is normed goes into a product."""


def finish_of(n, kind="rms", behind=False, normed=True, dtype=torch.bfloat16):
    """The rule of rows of n values, with norms of a kind."""
    norm = Norm(torch.empty(n, dtype=dtype), 1e-6, kind)
    finish = Finish(torch.empty(1, n), norm if normed else None, norm if behind else None)
    return finish_rule(finish, n)


@pytest.mark.parametrize(
    ("sums", "kind", "behind", "normed"),
    [("fp32", "rms", False, True), ("bf16", "rms", False, True), ("fp32", "layer", False, True),
     ("fp32", "rms", True, True), ("fp32", "rms", True, False)],
)  # fmt: skip
def test_norms_compile_without_fusion(sums, kind, behind, normed):
    """sums: a fold's in fp32, or a gathered row layer's one product, rounded."""
    for size, block, rows, warps in ((4096, 4096, 1, 8), (128, 128, 4, 4)):
        rule = finish_of(size, kind, behind, normed)
        types = {"sums": f"*{sums}", "stream": STREAM, "y": "*bf16", "m": "i32"}
        constants = {"RULE": rule, "PROGRAM": own_program((0,)), "ROWS": rows}
        ptx, log = compile_for_hopper(finish.finish_sums, types, constants, warps, 3)
        check(ptx, log, "norm", ["div.rn.f64", "sqrt.rn.f64"])
        assert rule.block == block
        assert "cvt.rn.bf16" in ptx and "st.global.v4.b32" in ptx


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_of_a_norm_over_ranks_compile_without_fusion(stage):
    types = dict.fromkeys(("x", "weight", "y"), "*bf16") | {"largest": "*fp32", "mass": "*i64"}
    constants = {
        "N": 1152,
        "COUNT": 4608,
        "EPS_BITS": norm.eps_bits(1e-6),
        "BLOCK": 2048,
        "STAGE": stage,
    }
    types |= {"stride": "i32"}
    ptx, log = compile_for_hopper(norm.part_of_rows, types, constants, 4, 3)
    check(ptx, log, f"stage {stage}", ["div.rn.f64", "sqrt.rn.f64"] if stage == 2 else [])
