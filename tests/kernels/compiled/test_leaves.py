"""Folds inside a program and cuts of a rank's roots: compiled for Hopper."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from tests.kernels.compiled.test_gemm import (
    STREAM,
    check,
    compile_for_hopper,
    descriptor_types,
    finish_of,
    form,
)
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import leaf_choice
from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import cut_roots
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants import leaf_fold as gemm_fold
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape, root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import finish
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.partial_sums import relative_roots

pytestmark = pytest.mark.long

LARGEST = Tile(128, 256, 64, 8, 3, "descriptor", halves=2)
SQUARE = Tile(128, 128, 64, 8, 4, "descriptor")
SMALL = Tile(64, 128, 128, 4, 4, "descriptor_swapped")
FORMS = {  # LEAVES, PARTS, PAIR
    "sequential": (8, 1, 1), "pairs cut": (2, 1, 1), "pairs": (8, 1, 2),
    "tree": (8, 2, 2),
}  # fmt: skip
ONCE_A_LEAF = 4096  # bytes a thread may spill where a leaf ends
EVERY_STEP = 8  # instructions of local memory between two steps' products


def compile_fold(variant, name, kernel="flat", **changed):
    """PTX and ptxas log of one kernel that folds."""
    leaves, parts, pair = FORMS[name]
    constants = {"TILE": form(variant), "ROOT": RootShape(leaves // (parts * pair), parts, pair)}
    types = descriptor_types(variant, "fp32") | dict.fromkeys(("roots", "steps"), "i32")
    function = gemm_fold.nested_fold if kernel == "nested" else gemm_fold.flat_fold
    types = {
        at: kind for at, kind in types.items() if at in function.arg_names and at not in changed
    }
    return compile_for_hopper(function, types, constants | changed, variant.warps, variant.stages)


def local_memory_in_the_hot_loop(ptx, path):
    """Loads and stores of local memory in the basic block that holds the matrix instructions."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for tool in ("ptxas", "ptxas-blackwell"):
        command = [str(tools / tool), "--gpu-name=sm_90a", "/dev/stdin", "-o", str(path)]
        if subprocess.run(command, input=ptx, capture_output=True, text=True).returncode == 0:
            break
    code = subprocess.run(
        [str(tools / "nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True
    ).stdout
    blocks = [[]]
    for line in code.splitlines():
        if re.match(r"\s*\.L_\w+:", line):
            blocks.append([])
        blocks[-1].append(line)
        if "BRA" in line:
            blocks.append([])
    hot = [block for block in blocks if any("HGMMA" in line for line in block)]
    assert hot
    return sum(bool(re.search(r"\b(STL|LDL)\b", line)) for block in hot for line in block)


@pytest.mark.parametrize(
    ("form", "variant"),
    [
        ("pairs cut", LARGEST),
        *((form, SQUARE) for form in FORMS if form != "pairs cut"),
        *(pytest.param(form, SMALL, marks=pytest.mark.slow) for form in FORMS),
        pytest.param("pairs cut", SQUARE, marks=pytest.mark.slow),
    ],
)
def test_flat_folds_spill_only_where_a_leaf_ends(form, variant, tmp_path):
    ptx, log = compile_fold(variant, form)
    check(ptx, log, form, ["wgmma.mma_async", "cp.async.bulk.tensor"], spills_allowed=ONCE_A_LEAF)
    assert local_memory_in_the_hot_loop(ptx, tmp_path / "fold.cubin") <= EVERY_STEP


@pytest.mark.parametrize("form", ["pairs", "tree"])
def test_nested_folds_compile_without_serialised_matrix_instructions(form):
    ptx, log = compile_fold(SQUARE, form, "nested")
    check(ptx, log, form, ["wgmma.mma_async"], spills_allowed=128)


def additions(ptx):
    return len(re.findall(r"\badd(?:\.rn)?\.f32\b", ptx))


@pytest.mark.parametrize(
    ("form", "each"), [("sequential", 1), ("pairs cut", 1), ("pairs", 2), ("tree", 3)]
)
def test_leaf_sums_are_added_apart_from_their_products(form, each):
    """`each` additions a value stand in the code; the number of steps is never specialised."""
    ptx, _ = compile_fold(SQUARE, form)
    values = SQUARE.rows * SQUARE.columns // (32 * SQUARE.warps)
    assert additions(ptx) >= each * values
    assert "steps" in gemm_fold.flat_fold.do_not_specialize


def test_with_one_step_known_the_additions_vanish():
    """Negative control: what the unspecialised number of steps guards against."""
    ptx, _ = compile_fold(SQUARE, "sequential", steps=1)
    assert additions(ptx) == 0


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize(
    ("block", "rows", "warps"), [(4096, 1, 16), (4096, 1, 8), (8192, 1, 8), (128, 4, 4)]
)
def test_fold_and_norm_compiles_without_fusion_or_spills(count, block, rows, warps):
    types = {"sums": "*fp32", "stream": STREAM, "y": "*bf16", "m": "i32"}
    constants = {
        "RULE": finish_of(block),
        "PROGRAM": own_program((order.fold_tree("pairs", count),)),
        "ROWS": rows,
    }
    ptx, log = compile_for_hopper(finish.finish_sums, types, constants, warps, 3)
    check(ptx, log, "norm", ["div.rn.f64", "sqrt.rn.f64"])
    assert len(re.findall(r"ld\.global\.v4", ptx)) >= count, "a row is read 16 bytes a time"


def test_every_root_that_a_rank_sends_can_be_folded_in_its_program():
    for name in order.FOLD_ORDERS:
        for leaves in (1, 2, 4, 8):
            for ranks in (r for r in (1, 2, 4, 8) if r <= leaves):
                plan, share = order.fold_plan(name, leaves, ranks), leaves // ranks
                for rank, roots in enumerate(plan.roots):
                    assert root_form(rank * share, share, roots), (name, leaves, ranks)
    assert root_form(0, 4, (((0, 1), 2), 3)) is None  # three leaves of a chain and one


def test_a_cut_is_the_same_tree_and_its_units_are_alike():
    for name in order.FOLD_ORDERS:
        for leaves, ranks in ((8, 1), (8, 2), (8, 4), (16, 2), (4, 1)):
            share = leaves // ranks
            for roots in order.fold_plan(name, leaves, ranks).roots:
                roots = relative_roots(roots)
                for cut in (1, 2, 4, 8):
                    found = cut_roots(roots, cut)
                    if found is None:
                        continue
                    units, rest = found
                    put = lambda i, units=units: units[i]
                    join = lambda left, right: (left, right)
                    assert tuple(order.evaluate(root, put, join) for root in rest) == roots
                    assert len(units) * cut == share
                assert cut_roots(roots, 1) is not None


def rank_roots():
    """(leaves of a rank, its roots) of every order at TP 1, 2, 4."""
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4):
            share = 8 // ranks
            for roots in order.fold_plan(name, 8, ranks).roots:
                yield share, relative_roots(roots)


@pytest.mark.parametrize("k", [16, 32, 48, 64, 128, 512])
def test_a_leaf_of_one_step_is_never_folded_inside_a_program(k):
    """The compiler would add the total into the product's accumulator: another order."""
    for m in (1, 33, 65, 300, 4096):
        for leaves, roots in rank_roots():
            chosen = leaf_choice(m, 512, k, leaves, roots, float32=False, sms=132, gpu=H200)
            for choice in (chosen, *leaf_candidates(m, 512, k, leaves, roots, H200)):
                assert k % choice.tile.depth == 0
                assert choice.cut == 1 or k // choice.tile.depth >= 2
            if k == 16:
                assert chosen.cut == 1


def test_the_largest_tile_never_folds_more_than_two_leaves():
    """Its registers are full: measured 2 to 3.6 times slower than a tile of half the size."""
    for m in (1, 200, 1024, 8192):
        for leaves, roots in rank_roots():
            for choice in leaf_candidates(m, 4096, 1536, leaves, roots, H200):
                large = choice.tile.rows * choice.tile.columns >= 128 * 256
                assert not large or choice.cut <= 2, choice


@pytest.mark.parametrize(("name", "k", "m", "ranks", "wanted"), [
    ("pairs", 512, 1, 1, (8, "flat", 16, 64)), ("pairs", 1536, 16, 2, (4, "flat", 16, 64)),
    ("sequential", 512, 16, 1, (8, "flat", 16, 64)), ("pairs", 512, 16, 4, (1, "chain", 16, 64)),
    ("pairs", 512, 32, 1, (2, "flat", 32, 128)), ("pairs", 1536, 64, 1, (2, "flat", 64, 128)),
    ("pairs", 512, 128, 1, (2, "flat", 128, 128)), ("pairs", 1536, 256, 1, (2, "flat", 128, 256)),
    ("pairs", 512, 1024, 1, (8, "gluon", 128, 128)),
    ("pairs", 1536, 4096, 1, (8, "gluon", 128, 128)),
    ("pairs", 512, 4096, 2, (4, "gluon", 128, 128)),
    ("pairs", 1536, 4096, 2, (4, "gluon", 128, 128)),
    ("pairs", 512, 8192, 4, (2, "gluon", 128, 128)), ("tree", 512, 4096, 1, (8, "gluon", 128, 128)),
])  # fmt: skip
def test_the_static_choice_is_what_won_on_an_h200(name, k, m, ranks, wanted):
    share = 8 // ranks
    roots = relative_roots(order.fold_plan(name, 8, ranks).roots[0])
    choice = leaf_choice(m, 4096, k, share, roots, float32=False, sms=132, gpu=H200)
    assert (choice.cut, choice.kernel, choice.tile.rows, choice.tile.columns) == wanted


def test_without_descriptors_or_in_fp32_every_leaf_is_apart():
    for leaves, roots in rank_roots():
        for float32, sms in ((True, 132), (False, 0)):
            choice = leaf_choice(512, 4096, 512, leaves, roots, float32=float32, sms=sms, gpu=H200)
            assert (
                choice.cut == 1
                and choice.kernel == "chain"
                and not variant_of(choice.tile).descriptors
            )
