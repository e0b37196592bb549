"""Column candidates without a GPU: compiled for Hopper."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.test_gemm import (
    check,
    compile_for_hopper,
    descriptor_types,
    form,
    pointer_types,
)
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants import descriptor as gemm_descriptor
from tpdet.kernels.cuda.gemm.variants import pointer as gemm_pointer
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import ProductShape
from tpdet.kernels.cuda.hardware import A100, H200
from tpdet.kernels.cuda.launch.dependent import FIRST, SECOND
from tpdet.kernels.inputs.activations import activation_number


def candidates(kind, counts=BUCKETS):
    """Every tile of the shapes that are tuned, once, in a fixed order."""
    found = {
        variant
        for m in counts
        for n in (1536, 6144, 24576)
        for variant in column_candidates(m, n, 4096, kind, H200)
    }
    return sorted(found, key=format_tile)


def of_most_stages(tiles):
    """Of tiles that differ in their stages alone, the one with most: the same code, once."""
    found = {replace(tile, stages=0): tile for tile in sorted(tiles, key=lambda tile: tile.stages)}
    return sorted(found.values(), key=format_tile)


def compile_candidate(variant, kind, **more):
    out, gated = "fp32" if kind == "head" else "bf16", activation_number(kind)
    if variant_of(variant).descriptors:
        types, kernel = descriptor_types(variant, out, gated), gemm_descriptor.descriptor_chain
        constants = {"FORM": form(variant, GATED=gated)}
    else:
        types, kernel = pointer_types("bf16", out), gemm_pointer.pointer_chain
        constants = {"FORM": form(variant, GATED=gated, EVEN=True), "expert_ids": None}
    constants |= more
    ptx, log = compile_for_hopper(kernel, types, constants, variant.warps, variant.stages)
    check(ptx, log, f"{kind} {format_tile(variant)}", ["mma"])
    if gated:
        check_gates(ptx, variant)
    return ptx, log


def check_gates(ptx, variant, warps=None):
    """A division a gate, in fp32 and without a branch, and no other: one arithmetic everywhere."""
    gates = variant.rows * variant.columns // 2 // (32 * (warps or variant.warps))
    assert len(re.findall(r"div\.full\.f32", ptx)) >= gates
    assert "ex2.approx" in ptx and not re.search(r"div\.(rn|approx)\.f", ptx)


@pytest.mark.parametrize("rows", some_slow([16], [1, 16, 32, 64]))
def test_swapped_descriptor_tiles_compile_to_wgmma_fed_by_the_copy_engine(rows):
    for variant in of_most_stages(candidates("column", (rows,))):
        if variant.variant.endswith("swapped") and variant_of(variant).descriptors:
            ptx, _ = compile_candidate(variant, "column")
            assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx
            assert f"m64n{variant.rows}k16" in ptx


@pytest.mark.parametrize("depth", some_slow([512], [64, 128, 256, 512]))
def test_narrow_tiles_compile_without_spills(depth):
    tiles = column_candidates(1, 1536, 4096, "column", H200)
    narrow = {v for v in tiles if not variant_of(v).descriptors and v.depth == depth}
    assert narrow
    for variant in of_most_stages(narrow):
        compile_candidate(variant, "column")


GATED_TILES = (
    Tile(16, 64, 128, 4, 5, "pointer_swapped"), Tile(8, 16, 512, 1, 4, "pointer_swapped"),
    Tile(64, 32, 128, 4, 4), Tile(16, 16, 256, 4, 6),
    Tile(128, 128, 64, 8, 4, "descriptor"), Tile(128, 256, 64, 8, 4, "descriptor"),
    Tile(16, 64, 256, 4, 5, "descriptor_swapped"), Tile(64, 128, 128, 4, 4, "descriptor_swapped"),
)  # fmt: skip
"""Of each variant, those that are launched most and the largest; of mma.sync the smallest."""
GATED_CASES = [*(("gated", tile) for tile in GATED_TILES), ("geglu", GATED_TILES[0])]
GATED_CASES.append(("geglu", GATED_TILES[5]))


@pytest.mark.parametrize(
    ("kind", "variant"), some_slow([GATED_CASES[i] for i in (2, 5, 7, 8)], GATED_CASES)
)
def test_gated_tiles_compile_with_their_division_and_without_spills(kind, variant):
    assert variant_of(variant).fits(ProductShape(4096, 24576, 4096, 1, 2, True), variant, H200)
    compile_candidate(variant, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["column", "gated", "head"])
def test_every_candidate_compiles_without_spills_or_serialised_instructions(kind):
    for variant in candidates(kind, BUCKETS[:13] if kind == "head" else BUCKETS):
        if variant.variant != "warp_specialised":  # test_gluon_gemm compiles those
            compile_candidate(variant, kind)


def test_a_serialised_tile_is_noticed():
    """Negative control: the tile that the candidates leave out."""
    with pytest.raises(AssertionError):
        compile_candidate(Tile(8, 64, 256, 4, 4, "pointer_swapped"), "column")


@pytest.mark.parametrize("kind", ["column", "gated", "head"])
def test_candidates_fit_the_machine(kind):
    for m in BUCKETS:
        for n, k in ((1536, 4096), (6144, 4096), (57344, 8192), (48, 48), (2368, 2880)):
            found = column_candidates(m, n, k, kind, H200)
            assert found and len(set(found)) == len(found)
            for variant in found:
                assert k % variant.depth == 0
                stages = (variant.rows + variant.columns) * variant.depth * 2 * variant.stages
                assert stages <= H200.shared_bytes
                assert kind != "gated" or variant.columns % 16 == 0, variant
                assert kind != "head" or variant.variant != "warp_specialised"
            plain = column_candidates(m, n, k, kind, A100)
            assert not any(variant_of(variant).descriptors for variant in plain)


def test_pairs_of_eights_leave_out_tiles_of_eight_columns():
    """And half the output makes room for one stage more of the largest tile."""
    kinds = "column", "gated"
    few, many = (
        {kind: set(column_candidates(m, 1536, 4096, kind, H200)) for kind in kinds}
        for m in (16, 4096)
    )
    assert few["column"] - few["gated"] == {Tile(16, 8, 512, 4, 4)}
    assert not few["gated"] - few["column"]
    largest = Tile(128, 256, 64, 4, 4, "warp_specialised")
    assert largest in many["gated"] - many["column"]
    assert many["column"] < many["gated"]


def test_names_of_tiles_are_unique():
    tiles = {*candidates("column"), *candidates("gated")}
    names = [format_tile(variant) for variant in tiles]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"\d+x\d+x\d+ w\d+ s\d+( \w+)*", name) for name in names)


@pytest.mark.parametrize("turn", [FIRST, SECOND])
@pytest.mark.parametrize(
    ("tile", "kind"),
    [
        (Tile(8, 16, 512, 1, 4, "pointer_swapped"), "head"),
        (Tile(64, 16, 256, 4, 5, "descriptor"), "gated"),
    ],
)
def test_products_of_a_pair_let_in_at_once_or_wait_last(tile, kind, turn):
    compile_candidate(tile, kind, DEPENDENT=turn)
