"""Column candidates without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.test_gemm import (
    check,
    compile_for_hopper,
    descriptor_types,
    tile,
)
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants import descriptor as gemm_descriptor
from tpdet.kernels.cuda.gemm.variants import pointer as gemm_pointer
from tpdet.kernels.cuda.gemm.variants import swapped as gemm_swapped
from tpdet.kernels.cuda.hardware import H200


def candidates(wide_out, counts=BUCKETS):
    """Every tile of the shapes that are tuned, once, in a fixed order."""
    found = {
        variant
        for m in counts
        for n in (1536, 6144, 24576)
        for variant in column_candidates(m, n, 4096, wide_out=wide_out, descriptors=True)
    }
    return sorted(found, key=format_tile)


def compile_candidate(variant, out):
    constants = tile(variant)
    if variant_of(variant).descriptors:
        types = descriptor_types(variant, out) | {"k": "i32", "leaves": "i32", "bias": "*bf16"}
        constants |= {"HALVES": variant.halves, "HAS_BIAS": False}
        kernel = (
            gemm_swapped.swapped_chain
            if variant.variant.endswith("swapped")
            else gemm_descriptor.descriptor_chain
        )
    else:
        types = dict.fromkeys(("x", "w", "bias"), "*bf16") | {"y": f"*{out}"}
        types |= dict.fromkeys(("m", "n", "k", "stride_x"), "i32")
        constants |= {
            "SWAP": variant.variant.endswith("swapped"),
            "EVEN_N": True,
            "HAS_BIAS": False,
        }
        kernel = gemm_pointer.pointer_chain
    ptx, log = compile_for_hopper(kernel, types, constants, variant.warps, variant.stages)
    check(ptx, log, format_tile(variant), ["mma"])
    return ptx, log


def test_swapped_descriptor_tiles_compile_to_wgmma_fed_by_the_copy_engine():
    for variant in candidates(False, (1, 16, 32, 64)):
        if variant.variant.endswith("swapped") and variant_of(variant).descriptors:
            ptx, _ = compile_candidate(variant, "bf16")
            assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx
            assert f"m64n{variant.rows}k16" in ptx


def test_narrow_tiles_compile_without_spills():
    narrow = set(column_candidates(1, 1536, 4096, wide_out=False, descriptors=False))
    for variant in sorted(narrow, key=format_tile):
        compile_candidate(variant, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_candidate_compiles_without_spills_or_serialised_instructions(out):
    for variant in candidates(out == "fp32", BUCKETS if out == "bf16" else BUCKETS[:13]):
        if variant.variant != "warp_specialised":  # test_gluon_gemm compiles those
            compile_candidate(variant, out)


def test_a_serialised_tile_is_noticed():
    """Negative control: the tile that the candidates leave out."""
    from tpdet.kernels.cuda.gemm.variants.tile import Tile

    with pytest.raises(AssertionError):
        compile_candidate(Tile(8, 64, 256, 4, 4, "pointer_swapped"), "bf16")


@pytest.mark.parametrize("wide_out", [False, True])
def test_candidates_fit_the_machine(wide_out):
    for m in BUCKETS:
        for n, k in ((1536, 4096), (6144, 4096), (57344, 8192), (48, 48)):
            found = column_candidates(m, n, k, wide_out=wide_out, descriptors=True)
            assert found and len(set(found)) == len(found)
            for variant in found:
                assert k % variant.depth == 0
                stages = (variant.rows + variant.columns) * variant.depth * 2 * variant.stages
                assert stages <= H200.shared_bytes
            plain = column_candidates(m, n, k, wide_out=wide_out, descriptors=False)
            assert not any(variant_of(variant).descriptors for variant in plain)


def test_names_of_tiles_are_unique():
    names = [format_tile(variant) for variant in candidates(False)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"\d+x\d+x\d+ w\d+ s\d+( \w+)*", name) for name in names)
