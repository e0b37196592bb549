"""The GPU's kernels of experts without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.kernels.compiled.test_columns import check_gates
from tests.kernels.compiled.test_gemm import check, compile_for_hopper, form, pointer_types
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.experts import (
    gather,
    lane_tiles,
    lanes,
    router,
    shared_lanes,
    sorted_tokens,
    streamed_lanes,
)
from tpdet.kernels.cuda.experts.candidates import CANDIDATES
from tpdet.kernels.cuda.experts.tiles import ExpertWeight
from tpdet.kernels.cuda.gemm.variants.pointer import pointer_chain
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.warp_swapped import SwappedForm, warp_swapped_chain
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.activations import EXPERT_ACTIVATIONS
from tpdet.kernels.order import fold_tree

CASES = sorted({(tile, bucket.by_token) for bucket in CANDIDATES for tile in bucket.tiles}, key=str)
FIRST = [
    (tile, shared)
    for tile, shared in CASES
    if tile.stages > 9 or tile.rows == 128 or (tile.rows, tile.columns) == (32, 64)
]
"""Those that are launched most, and the largest."""


def compile_tile(tile, shared, name, bias=False):
    """PTX, the log of ptxas -v and bytes of shared memory of one product by a tile."""
    number = EXPERT_ACTIVATIONS[name] if name else 0
    if tile.variant.startswith("pointer"):
        types, kernel = pointer_types("bf16") | {"expert_ids": "*i32"}, pointer_chain
        more = {"BIAS": bias, "GATED": number, "EXPERTS": True, "SHARED": shared}
        constants = {"FORM": form(tile, **more)}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    else:
        from triton.experimental.gluon.language import NVMMASharedLayout

        across = 32 if name else 64
        stage, slot = (NVMMASharedLayout(line, 16, 2) for line in (128, 2 * across))
        types = {
            "w_tiles": f"tensordesc<bf16[64,64],{stage!r}>",
            "x_tiles": f"tensordesc<bf16[{tile.rows},64],{stage!r}>",
            "y_tiles": f"tensordesc<bf16[{tile.rows},{across}],{slot!r}>",
            "bias": "*bf16",
            "expert_ids": "*i32",
        } | dict.fromkeys(("n", "steps"), "i32")
        constants = {"FORM": SwappedForm(tile.rows, 64, tile.stages, shared, bias, number)}
        kernel, options = warp_swapped_chain, {"num_warps": 4}
    aligned = [n for n, t in types.items() if t.startswith("*") or n in ("n", "k", "stride_x")]
    done = hopper_kernel(kernel, types, constants, aligned, options)
    return done.ptx, done.log, done.shared


def check_tile(tile, shared, name):
    ptx, log, held = compile_tile(tile, shared, name, bias=not name)
    pointers = tile.variant.startswith("pointer")
    instruction = "mma" if pointers else f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16"
    check(ptx, log, f"{tile} {name}", [instruction])
    assert held * tile.ctas <= H200.shared_bytes, f"{tile} takes {held} bytes"
    if not pointers:
        assert ExpertWeight(1536, 2048, 2, bool(name)).fits(tile, H200), tile
        assert "wgmma.wait_group.sync.aligned 1;" in ptx, "a step's products wait for themselves"
        assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    if name:
        check_gates(ptx, tile, None if pointers else 8)


@pytest.mark.parametrize(("tile", "shared"), FIRST, ids=str)
def test_tiles_compile_without_spills_or_serialised_instructions(tile, shared):
    check_tile(tile, shared, "silu")


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "shared"), CASES, ids=str)
def test_every_tile_compiles_without_spills_or_serialised_instructions(tile, shared):
    for name in ("", "silu"):
        check_tile(tile, shared and bool(name), name)


def test_clamped_gates_with_biases_compile_without_spills():
    tile = Tile(16, 128, 64, 4, 10, "warp_swapped")
    weights = ExpertWeight(5760, 2880, 2, True), ExpertWeight(2880, 2880, 2, False)  # gpt-oss
    assert all(weight.fits(tile, H200) for weight in weights)
    ptx, log, _ = compile_tile(tile, False, "clamped", bias=True)
    check(ptx, log, f"{tile} clamped", ["wgmma.mma_async.sync.aligned.m64n16k16", "div.full.f32"])


def test_a_pipeline_that_does_not_fit_is_known():
    most = Tile(128, 128, 64, 4, 6, "warp_swapped")
    assert ExpertWeight(2048, 768, 2, False).fits(most, H200)
    for tile, n, k, size, gated in (
        (Tile(128, 128, 64, 4, 7, "warp_swapped"), 2048, 768, 2, False),
        (most, 2048, 768, 4, False),
        (most, 2048, 784, 2, False),
        (most, 2044, 768, 2, False),
        (most, 1544, 768, 2, True),
        (Tile(24, 128, 64, 4, 3, "warp_swapped"), 2048, 768, 2, False),
        (Tile(16, 64, 64, 4, 3, "warp_swapped"), 2048, 768, 2, False),
        (Tile(128, 128, 64, 4, 5, "warp_specialised"), 2048, 768, 2, False),
    ):
        assert not ExpertWeight(n, k, size, gated).fits(tile, H200), tile


def test_small_kernels_compile_and_their_atomics_count_choices_alone():
    integers = dict.fromkeys(("ids", "counts", "first_blocks", "positions", "expert_ids"), "*i32")
    sizes = dict.fromkeys(("choices", "first", "experts"), "i32")
    common = {"CHOSEN": 8, "EXPERTS": 128, "ROWS": 16, "BY_TOKEN": False, "BLOCK": 512}
    for kernel, more, counts in (
        (sorted_tokens.sort_few, {"CHOICES": 2048}, True),
        (sorted_tokens.count_choices, {}, True),
        (sorted_tokens.find_blocks, {}, False),
        (sorted_tokens.position_choices, {}, False),
    ):
        taken = set(kernel.arg_names)
        types = {n: t for n, t in (integers | sizes).items() if n in taken}
        constants = {n: v for n, v in (common | more).items() if n in taken}
        aligned = [n for n, t in types.items() if t.startswith("*")]
        done = hopper_kernel(kernel, types, constants, aligned, {"num_warps": 4})
        atomics = re.findall(r"(?<![a-z])(?:atom|red)\.[\w.:]+", done.ptx)
        assert bool(atomics) == counts and all(a.endswith(".add.u32") for a in atomics), atomics


def test_router_gathering_and_lanes_compile_without_fusion():
    types = dict.fromkeys(("logits", "bias", "weights"), "*fp32")
    types |= dict.fromkeys(("spans", "ids", "positions", "expert_ids"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("rows", "sequences", "experts", "first", "held", "stride"), "i32")
    few = router.padded_experts(8)
    assert few == 32, "a row fills a warp's lanes"
    for experts, sigmoid, rows in (
        (few, False, 2),
        (128, False, 1),
        (512, True, 1),
        (128, False, 16),
    ):
        constants = {
            "FORM": router.Gating(rows, 8, experts, sigmoid, sigmoid, True, 16 * (rows > 1))
        }
        ptx, log = compile_for_hopper(router.gate_rows, types, constants, rows, 3)
        check(ptx, log, "router", ["div.rn.f64", "ex2.approx"])
        assert ("div.rn.f32" in ptx) == sigmoid
    types = {"x": "*bf16", "positions": "*i32", "y": "*bf16", "width": "i32"}
    constants = {"CHOSEN": 8, "BLOCK": 2048}
    for kernel, more in (
        (gather.copy_to_blocks, {"APART": False}),
        (gather.copy_to_blocks, {"APART": True}),
        (gather.copy_from_blocks, {}),
    ):
        ptx, log = compile_for_hopper(kernel, types, constants | more, 4, 3, ("width",))
        check(ptx, log, "gather", ["ld.global.v4.b32", "st.global.v4.b32"])
    types = {"y": "*bf16", "ids": "*i32", "weights": "*fp32", "positions": "*i32"}
    types |= {"shared": "*fp32", "sums": "*fp32"} | dict.fromkeys(("rows", "width", "first"), "i32")
    for block, shared in ((256, True), (512, False)):
        constants = {
            "CHOSEN": 8,
            "PER_LANE": 16,
            "PROGRAM": own_program((fold_tree("tree", 8),)),
            "HAS_SHARED": shared,
            "BLOCK": block,
        }
        ptx, log = compile_for_hopper(lanes.lane_sums, types, constants, 4, 3, ("width",))
        check(ptx, log, "lanes", ["mul.rn.f32", "add.rn.f32"])


SPILT_BY_LANES = {lane_tiles.LaneTile(64, 64, 16, 1): 300}
"""Bytes that a thread may spill: 512 threads have 128 registers each, and the sums of all choices
take 64 of them. It spills 220 by Triton 3.6, 300 by 3.9; by 3.6 on an H200 it took
397 us at 8,192 rows, where 64 x 32 without any took 445."""


def lanes_with_shared(tile, depth, gated):
    """PTX and log of lanes over eight leaves of `depth` inputs."""
    types = {"y": "*bf16", "ids": "*i32", "weights": "*fp32", "positions": "*i32"}
    types |= {"mixed": "*bf16", "down": "*bf16", "gate": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys(("rows", "width", "first", "gate_stride"), "i32")
    form, program = (
        shared_lanes.JoinedForm(8, 32, depth, gated),
        own_program((fold_tree("tree", 8),)),
    )
    constants = {"FORM": form, "TILE": tile, "PROGRAM": program}
    kernel, sizes = shared_lanes.lane_sums_with_shared, ("width", "gate_stride")
    return compile_for_hopper(kernel, types, constants, tile.warps, 3, sizes)


@pytest.mark.parametrize("tile", lane_tiles.tiles(), ids=str)
def test_lanes_with_a_shared_expert_compile_without_fusion(tile):
    ptx, log = lanes_with_shared(tile, 64, True)
    name = f"lanes and shared {tile}"
    matrix = "wgmma.mma_async" if tile.rows >= 64 else "mma.sync"
    expected = [matrix, "mul.rn.f32", "add.rn.f32", "div.rn.f32"]
    check(ptx, log, name, expected, True, SPILT_BY_LANES.get(tile, 0))


SPILT_BY_STREAMED_LANES = 400
"""Bytes that a thread may spill: nearly all in the second walk, which hardly ever runs."""


@pytest.mark.parametrize(("leaves", "depth", "gated"), [(8, 64, True), (2, 16, False)])
def test_streamed_lanes_compile_to_chains_that_fill_no_other_lane(leaves, depth, gated):
    """One multiplication a product, a fused addition of a flag a lane, and no layout in between."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    rows, weights = (NVMMASharedLayout(2 * depth, 16, rank) for rank in (2, 5))
    types = {"y": "*bf16", "ids": "*i32", "weights": "*fp32", "positions": "*i32"}
    types["mixed_tiles"] = f"tensordesc<bf16[64,{depth}],{rows!r}>"
    types["down_tiles"] = f"tensordesc<bf16[{leaves},8,4,2,{depth}],{weights!r}>"
    types |= {"gate": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys(("rows", "width", "first", "gate_stride", "programs"), "i32")
    form = shared_lanes.JoinedForm(8, 32, depth, gated)
    constants = {"FORM": form, "PROGRAM": own_program((fold_tree("tree", leaves),))}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name == "width"]
    options = {"num_warps": lane_tiles.STREAMED.warps}
    done = hopper_kernel(streamed_lanes.stream_lanes, types, constants, aligned, options)
    expected = ["wgmma.mma_async", "cp.async.bulk.tensor.5d", "cp.async.cg", "fma.rn.f32"]
    check(done.ptx, done.log, "streamed lanes", expected, True, SPILT_BY_STREAMED_LANES)
    assert done.shared <= H200.shared_bytes
    values = 16 * 8  # of a thread, all choices of a block of columns
    added = len(re.findall(r"add(?:\.rn)?\.f32", done.ptx))
    assert len(re.findall(r"fma\.rn\.f32", done.ptx)) - values * leaves < values
    assert added < values * (leaves + 4)


@pytest.mark.parametrize("depth", some_slow([16], [16, 32, 64, 128]))
def test_a_leaf_without_a_gate_is_added_to_its_lane_behind_its_chain(depth):
    """With a gate and without, as many additions: no chain begins with the lane's sum."""
    tile = lane_tiles.tiles()[0]
    texts = [lanes_with_shared(tile, depth, gated)[0] for gated in (True, False)]
    with_gate, without = (len(re.findall(r"add(?:\.rn)?\.f32", ptx)) for ptx in texts)
    assert without == with_gate - 2 > 0  # but for the gates of a thread's two rows
