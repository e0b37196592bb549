"""Warp-specialised GEMM, compiled for Hopper without a GPU."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.kernels.compiled.test_columns import check_gates
from tests.kernels.compiled.test_gemm import check
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.experts.packed_tiles import packed_tile, packed_tiles_in_use
from tpdet.kernels.cuda.gemm.packed.chain import (
    DENSE,
    IN_BLOCKS,
    PackedForm,
    packed_chain,
)
from tpdet.kernels.cuda.gemm.packed.choice import fits, way_of
from tpdet.kernels.cuda.gemm.packed.launch import ONE_LEAF, PackedTile, run_packed
from tpdet.kernels.cuda.gemm.packed.numbers import NumbersForm, unpacked_weight
from tpdet.kernels.cuda.gemm.packed.turns import packed_turns
from tpdet.kernels.cuda.gemm.packed.warp_specialised import WarpPackedForm, warp_packed_chain
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, RootShape
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands, ProductShape
from tpdet.kernels.cuda.gemm.variants.warp_specialised import WarpForm, warp_specialised_fold
from tpdet.kernels.cuda.gemm.variants.warp_specialised_launch import (
    folds,
    run_gluon_column,
    run_gluon_fold,
    slots_bytes,
    takes,
)
from tpdet.kernels.cuda.gemm.variants.warp_specialised_parts import warp_specialised_parts
from tpdet.kernels.cuda.hardware import H200, pretending
from tpdet.kernels.cuda.launch.dependent import FIRST, SECOND
from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    INT8,
)

FORMS = {  # GROUPS, PARTS, PAIR; additions a value, in the code
    "cut": (2, 1, 1, 1), "sequential": (8, 1, 1, 1), "pairs": (4, 1, 2, 2), "tree": (2, 2, 2, 5),
    "column": (1, 1, 1, 0), "shifted": (1, 1, 1, 1), "gated": (1, 1, 1, 0.5),
}  # fmt: skip
COLUMNS = ("column", "shifted", "gated")
FOUR_STAGES = 4 * (128 + 256) * 64 * 2 + 128 * 128 * 2 + 1024
TILE = Tile(128, 128, 64, 4, 6, "descriptor")
WIDE = Tile(128, 256, 64, 4, 3, "warp_specialised")
GATED = (WIDE, replace(WIDE, stages=4), replace(WIDE, columns=128, stages=6))


def compiled(form, even=True, stages=None, sent=True, columns=None, **more):
    """PTX, the log of ptxas -v and bytes of shared memory for compute capability 9.0."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    columns = columns or (256 if form in COLUMNS else 128)
    stages = stages or (3 if columns == 256 else 5)
    out, width = "bf16" if form in COLUMNS else "fp32", columns // (2 if form == "gated" else 1)
    stage, slot = (NVMMASharedLayout(128, bits, 2) for bits in (16, 16 if out == "bf16" else 32))
    types = {
        "x_tiles": f"tensordesc<bf16[64,64],{stage!r}>",
        "w_tiles": f"tensordesc<bf16[{columns},64],{stage!r}>",
        "y_tiles": f"tensordesc<{out}[64,{width}],{slot!r}>",
        "y": f"*{out}",
        "bias": "*bf16",
    } | dict.fromkeys(("m", "n", "roots", "steps"), "i32")
    sizes = columns, 64, stages, *FORMS[form][:3]
    made_for = WarpForm(*sizes, even, sent, form == "shifted", int(form == "gated"))
    constants, aligned = {"FORM": made_for} | more, ("y", "bias", "n")
    done = hopper_kernel(warp_specialised_fold, types, constants, aligned, {"num_warps": 4})
    return done.ptx, done.log, done.shared


@pytest.mark.parametrize(
    ("form", "even", "sent"),
    some_slow(
        [(form, True, True) for form in FORMS] + [("tree", False, False)],
        [(form, True, True) for form in FORMS]
        + [(form, even, False) for form in FORMS if form not in COLUMNS for even in (True, False)],
    ),
)
def test_every_sum_stays_in_registers(form, even, sent):
    ptx, log, held = compiled(form, even, sent=sent)
    width = 256 if form in COLUMNS else 128
    check(ptx, log, form, [f"wgmma.mma_async.sync.aligned.m64n{width}k16", "cp.async.bulk.tensor"])
    stored = "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    assert stored == sent and held <= H200.shared_bytes, held
    # A thread of a consumer has 64 or 128 values; what a leaf adds stands in the code.
    found = len(re.findall(r"\badd(?:\.rn)?\.f32\b", ptx))
    assert found == width * FORMS[form][3], (form, found)  # of a gated tile, the 1 of 1 + exp
    assert "wgmma.wait_group.sync.aligned 1;" in ptx, "a step's products wait for themselves"
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    if granted:  # Triton 3.6 moves registers from the producer to the consumers
        assert granted.count(240) >= 2 and min(granted) == 24, granted
    assert "steps" in warp_specialised_fold.do_not_specialize


@pytest.mark.parametrize("turn", [FIRST, SECOND])
def test_the_first_of_a_pair_lets_the_second_in_and_that_waits_last(turn):
    compiled("column", DEPENDENT=turn)


@pytest.mark.parametrize("variant", GATED, ids=lambda tile: f"{tile.columns} s{tile.stages}")
def test_gated_tiles_hold_half_a_tile_and_divide_where_the_sums_are(variant):
    ptx, log, held = compiled("gated", stages=variant.stages, columns=variant.columns)
    wanted = f"wgmma.mma_async.sync.aligned.m64n{variant.columns}k16"
    check(ptx, log, f"{variant}", [wanted, "cp.async.bulk.tensor.2d.global.shared::cta"])
    check_gates(ptx, variant, warps=8)
    assert "shfl" not in ptx.replace("shfl.sync.idx", ""), "values move between threads"
    assert slots_bytes(variant, 1) - 1024 <= held <= slots_bytes(variant, 1) <= H200.shared_bytes
    assert variant != replace(WIDE, stages=4) or held == 229_576
    assert takes(ProductShape(4096, 24576, 4096, 1, 2, True), variant)


@pytest.mark.parametrize(("gated", "bias", "stages"), [(0, True, 4), (2, False, 5)])
def test_a_tile_of_two_parts_keeps_both_chains_in_registers(gated, bias, stages):
    from triton.experimental.gluon.language import NVMMASharedLayout

    def block(columns, line=128):
        return f"tensordesc<bf16[{columns}],{NVMMASharedLayout(line, 16, 2)!r}>"

    widths = (64, 32) if gated else (128, 64)
    types = {
        "x_tiles": block("64,64"),
        "w_wide": block("128,64"),
        "w_rest": block("64,64"),
        "y_wide": block(f"64,{widths[0]}"),
        "y_rest": block(f"64,{widths[1]}", 2 * min(widths[1], 64)),
        "bias": "*bf16",
    } | dict.fromkeys(("m", "n", "steps"), "i32")
    constants = {"FORM": WarpForm(192, 64, stages, BIAS=bias, GATED=gated)}
    done = hopper_kernel(warp_specialised_parts, types, constants, ("bias", "n"), {"num_warps": 4})
    ptx, tile = done.ptx, replace(WIDE, columns=192, stages=stages)
    wanted = [f"wgmma.mma_async.sync.aligned.m64n{columns}k16" for columns in (128, 64)]
    check(ptx, done.log, f"{gated}", wanted)
    assert "wgmma.wait_group.sync.aligned 2;" in ptx, "a step's products wait for themselves"
    assert done.shared <= slots_bytes(tile, 1 if gated else 2) <= H200.shared_bytes
    assert takes(ProductShape(256, 24576, 4096, 1, 2, gated > 0), tile)
    if gated:
        check_gates(ptx, tile, warps=8)


def test_four_stages_of_the_largest_tile_fit_a_gated_product_alone():
    four = replace(WIDE, stages=4)
    assert slots_bytes(four, ProductShape(1, 16, 64, 1, 2, True).column_bytes) == FOUR_STAGES
    assert FOUR_STAGES <= H200.shared_bytes < slots_bytes(four, 2)


FITTING = ("pairs", RootForm(1, 4, 1, 2), False, 7), ("tree", RootForm(1, 2, 2, 2), True, 5)


@pytest.mark.parametrize(
    ("name", "form", "sent", "most"),
    some_slow([FITTING[1]], FITTING),
)
def test_what_is_said_to_fit_does_and_no_stage_more(name, form, sent, most):
    fits = [folds(form, 512, replace(TILE, stages=n), H200) for n in (most, most + 1)]
    assert fits == [True, False]
    sizes = [compiled(name, stages=n, sent=sent)[2] for n in (most, most + 1)]
    assert sizes[0] <= H200.shared_bytes < sizes[1]
    for variant, size in ((WIDE, 2), (replace(TILE, stages=5), 4)):
        assert slots_bytes(variant, size) <= H200.shared_bytes
        assert slots_bytes(replace(variant, stages=variant.stages + 1), size) > H200.shared_bytes


@pytest.mark.parametrize(
    ("k", "variant", "sms", "dtype"),
    [
        (512, replace(TILE, columns=256), 132, torch.bfloat16),
        (512, replace(TILE, rows=64), 132, torch.bfloat16),
        (512, replace(TILE, depth=32), 132, torch.bfloat16),
        (512, replace(TILE, variant="descriptor_swapped"), 132, torch.bfloat16),
        (528, TILE, 132, torch.bfloat16),
        (64, TILE, 132, torch.bfloat16),
        (512, TILE, 0, torch.bfloat16),
        (512, TILE, 132, torch.float32),
    ],
)
def test_what_does_not_fit_is_refused(k, variant, sms, dtype):
    x, w, y = torch.empty(2, 2 * k, dtype=dtype), torch.empty(2, 8, k, dtype=dtype), torch.empty(0)
    with pytest.raises(ValueError, match="gluon"):
        run_gluon_fold(Operands(x, w, None, y), RootForm(1, 1, 1, 2), variant, sms)


@pytest.mark.parametrize(
    ("leaves", "n", "k", "variant", "out"),
    [
        (2, 256, 512, WIDE, torch.bfloat16),
        (1, 260, 512, WIDE, torch.bfloat16),
        (1, 256, 512, WIDE, torch.float32),
        (1, 256, 528, WIDE, torch.bfloat16),
        (1, 256, 512, replace(WIDE, stages=4), torch.bfloat16),
        (1, 256, 512, replace(WIDE, rows=64), torch.bfloat16),
    ],
)
def test_a_column_product_that_does_not_fit_is_refused(leaves, n, k, variant, out):
    x, w = torch.empty(2, leaves * k).bfloat16(), torch.empty(leaves, n, k).bfloat16()
    y = torch.empty(leaves, 2, n, dtype=out)
    with pretending(H200), pytest.raises(ValueError, match="take another tile"):
        run_gluon_column(Operands(x, w, None, y), variant, 132)


@pytest.mark.parametrize(
    ("n", "variant", "out"),
    [
        (264, WIDE, torch.bfloat16),  # half a pair of eights
        (256, replace(WIDE, stages=5), torch.bfloat16),
        (256, WIDE, torch.float32),
    ],
)
def test_a_gated_product_that_does_not_fit_is_refused(n, variant, out):
    x, w = torch.empty(2, 512).bfloat16(), torch.empty(1, n, 512).bfloat16()
    y = torch.empty(1, 2, n // 2, dtype=out)
    with pretending(H200), pytest.raises(ValueError, match="take another tile"):
        run_gluon_column(Operands(x, w, None, y, gated=1), variant, 132)


PACKED = {  # bits, group, rows of a scale, its type, instructions of a value and their number
    E4M3: (8, 128, 8, "fp32", "cvt.rn.f16x2.e4m3x2", 1 / 2),
    INT4: (4, 128, 1, "bf16", "mul.rn.bf16x2", 1 / 2),
    INT4_OF_HALF: (4, 128, 1, "fp16", "fma.rn.bf16x2", 1 / 2),
    E2M1: (4, 32, 1, "u8", "mul.rn.bf16x2", 1),
    INT4_ZERO: (4, 128, 1, "bf16", "mul.rn.bf16x2", 1 / 2),
    INT4_ZERO_OF_HALF: (4, 128, 1, "fp16", "fma.rn.bf16x2", 1 / 2),
    INT8: (8, 128, 1, "bf16", "mul.rn.f32", 1),
}
TILES = {
    way.tile
    for n in (4096, 24576)
    for k in (512, 4096)
    for m in (1, 16, 32, 64, 128, 256, 1024)
    if (way := way_of(m, (1, n, k), 128)) is not None
    and not (way.tile.specialised or way.tile.turns)
}
SOME_PACKED = [
    (E4M3, PackedTile(16, 1, 128, 4, programs=3), 1),
    (INT4, PackedTile(64, 1, 64, 8, programs=1), 0),
]


def chain_types(recipe, tile, y):
    """The types of what both kernels of a chain take."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits, _, _, scales, *_ = PACKED[recipe]
    lines = tile.depth * bits // 16
    codes, x = NVMMASharedLayout(128, 32, 3), NVMMASharedLayout(128, 16, 2)
    return {
        "code_tiles": f"tensordesc<i32[{tile.groups},{lines},32],{codes!r}>",
        "x_tiles": f"tensordesc<bf16[{tile.rows},{tile.depth}],{x!r}>",
        "scales": f"*{scales}",
        "zeros": "*u8",
        "y": y,
        "bias": "*bf16",
    } | dict.fromkeys(("m", "n", "steps", "blocks"), "i32")


def packed_kernel(recipe, tile, gated, cut=1, k=4096, rows_of=DENSE):
    bits, group, scale_rows, *_ = PACKED[recipe]
    types = chain_types(recipe, tile, "*bf16" if gated else "*fp32") | {"expert_ids": "*i32"}
    root = RootShape(1, 1, cut)
    kept, odd = 1 << (cut * k // group - 1).bit_length(), k // tile.depth % 2 == 1
    ends = odd, rows_of.value, tile.programs
    form = PackedForm(recipe, bits, *tile[:4], group, scale_rows, kept, False, gated, root, *ends)
    multiples = "scales", "y", "bias", "n"
    options = {"num_warps": 4 * tile.groups}
    return hopper_kernel(packed_chain, types, {"FORM": form}, multiples, options)[:3]


@pytest.mark.parametrize(
    ("recipe", "tile", "gated"),
    some_slow(
        SOME_PACKED,
        [*product(PACKED, sorted(TILES), (0, 1))],
    ),
    ids=str,
)
def test_a_weight_becomes_numbers_in_registers(recipe, tile, gated):
    ptx, log, held = packed_kernel(recipe, tile, gated)
    wanted = f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16.f32.bf16.bf16"
    check(ptx, log, f"{recipe} {tile}", [wanted, "cp.async.bulk.tensor.3d", PACKED[recipe][4]])
    assert "serialized" not in log and held <= H200.shared_bytes, held
    # Four steps stand in the code: the first, two of the loop, the last. A is in registers.
    assert len(re.findall(wanted.replace(".", r"\."), ptx)) == 4 * tile.depth // 16
    values = 4 * 64 * tile.depth // 128  # of a thread
    assert ptx.count(PACKED[recipe][4]) == values * PACKED[recipe][5]
    in_loop = ptx[ptx.index(wanted) : ptx.rindex(wanted)]
    assert "st.shared" not in in_loop and "shfl.sync.bfly" not in in_loop


@pytest.mark.parametrize("k", [128, 192, 256, 320, 768, 2048, 2880])
def test_every_step_has_a_tile_that_fits_and_that_a_start_tries(k):
    tried = packed_tiles_in_use(k)
    assert all(fits(tile, k) for tile, _ in tried)
    for tokens in (1, 8, 9, 16, 17, 100, 1000, 10_000):
        assert packed_tile(tokens, tokens * 8 / 128, k) in tried
        for leaves, n in product((1, 2, 8), (512, 4096, 24576)):
            way = way_of(tokens, (leaves, n, k), 32)
            assert way is None or fits(way.tile, k)


@pytest.mark.parametrize("n", [8192, 24576])
def test_a_row_of_many_scales_takes_a_tile_with_room_for_them(n):
    room = {8: PackedTile(8, 1, 128, 4), 64: PackedTile(64, 1, 64, 4)}
    for rows, tile in room.items():
        assert way_of(rows, (1, n, 16384), 32).tile == tile != way_of(rows, (1, n, 16384), 128).tile
    assert way_of(512, (1, n, 16384), 32).tile.specialised


def test_three_warpgroups_take_products_that_are_done_in_fewer_waves():
    three = PackedTile(128, 3, 64, 6, True)
    takes_three = {  # tiles of 2 and of 3 groups: 264 and 396 groups of 64 weight rows a wave
        (rows, n // 64)
        for rows in (64, 65, 128, 129)
        for n in (16384, 264 * 64, 265 * 64, 24576, 396 * 64, 397 * 64, 32768, 151936)
        if way_of(rows, (1, n, 4096), 128).tile == three
    }
    assert takes_three == {(rows, units) for rows in (65, 128) for units in (265, 384, 396)}
    assert way_of(128, (2, 24576, 4096), 128).tile != three
    with pytest.raises(ValueError, match="does not fold"):
        weight = SimpleNamespace(shape=(2, 384, 512))
        run_packed(None, weight, None, None, three, root=RootShape(1, 1, 2))


def test_a_block_of_an_expert_takes_an_odd_number_of_steps():
    ptx, log, held = packed_kernel(E2M1, PackedTile(32, 1, 64, 4), 1, k=2880, rows_of=IN_BLOCKS)
    wanted = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
    check(ptx, log, "experts", [wanted, "cp.async.bulk.tensor.3d"])
    assert "serialized" not in log and held <= H200.shared_bytes, held
    assert ptx.count(wanted) == 3 * 64 // 16  # the first step, two of the loop


@pytest.mark.parametrize(
    ("recipe", "rows", "depth", "programs"),
    some_slow(
        [(INT4, 8, 256, 1)],
        [(INT4, 8, 256, 1), (E4M3, 16, 256, 1), (E4M3, 64, 128, 1), (INT4_ZERO_OF_HALF, 8, 128, 2)],
    ),
)
def test_two_warpgroups_take_turns_with_one_chain(recipe, rows, depth, programs):
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits, group, scale_rows, *_ = PACKED[recipe]
    types = chain_types(recipe, PackedTile(rows, 1, depth, 4), "*bf16")
    sizes = bits, rows, 1, depth, 4, group, scale_rows, 4096 // group
    form = PackedForm(recipe, *sizes, False, 0, ONE_LEAF, False, DENSE.value, programs)
    constants = {"FORM": form, "HANDED": NVMMASharedLayout(128, 32, 2)}
    multiples = "scales", "y", "bias", "n"
    done = hopper_kernel(packed_turns, types, constants, multiples, {"num_warps": 4})
    wanted = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    check(done.ptx, done.log, f"{recipe} {rows}", [wanted, "cp.async.bulk.tensor.3d"])
    assert "serialized" not in done.log and programs * done.shared <= H200.shared_bytes
    assert done.ptx.count(wanted) == 2 * depth // 16  # a loop of each warpgroup


def warp_kernel(recipe, rows, stages, gated=0, root=ONE_LEAF, rows_of=DENSE, consumers=2):
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits, group, scale_rows, scales, *_ = PACKED[recipe]
    out, across = ("bf16", 2) if root == ONE_LEAF else ("fp32", 4), 32 if gated else 64
    codes, x = NVMMASharedLayout(128, 32, 3), NVMMASharedLayout(128, 16, 2)
    slot = NVMMASharedLayout(min(128, across * out[1]), 8 * out[1], 2)
    types = {
        "code_tiles": f"tensordesc<i32[1,{4 * bits},32],{codes!r}>",
        "x_tiles": f"tensordesc<bf16[{rows},64],{x!r}>",
        "y_tiles": f"tensordesc<{out[0]}[{rows},{across}],{slot!r}>",
        "scales": f"*{scales}",
        "zeros": "*u8",
        "y": f"*{out[0]}",
        "bias": "*bf16",
        "expert_ids": "*i32",
    } | dict.fromkeys(("m", "n", "roots", "steps"), "i32")
    sizes = bits, rows, 1, 64, stages, group, scale_rows
    ends = False, rows_of.value, True, consumers
    form = WarpPackedForm(recipe, *sizes, False, gated, root, *ends)
    multiples = "scales", "y", "bias", "n"
    options = {"num_warps": 4}
    return hopper_kernel(warp_packed_chain, types, {"FORM": form}, multiples, options)[:3]


@pytest.mark.parametrize(
    ("recipe", "rows", "stages", "gated", "root", "rows_of", "consumers"),
    some_slow(
        [(E4M3, 128, 5, 1, ONE_LEAF, DENSE, 2), (INT4, 128, 6, 1, ONE_LEAF, DENSE, 3)],
        [
            *((recipe, 128, 5, 1, ONE_LEAF, DENSE, 2) for recipe in PACKED),
            *((recipe, 128, 6, 1, ONE_LEAF, DENSE, 3) for recipe in PACKED),
            (E4M3, 128, 4, 0, RootShape(1, 2, 2), DENSE, 2),
            (INT4, 128, 4, 0, RootShape(4, 1, 2), DENSE, 2),
            (E2M1, 128, 6, 1, ONE_LEAF, IN_BLOCKS, 2),
        ],
    ),
    ids=str,
)
def test_consumers_unpack_while_products_run(recipe, rows, stages, gated, root, rows_of, consumers):
    ptx, log, held = warp_kernel(recipe, rows, stages, gated, root, rows_of, consumers)
    wanted = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    check(ptx, log, f"{recipe} {rows}", [wanted, "cp.async.bulk.tensor.3d", PACKED[recipe][4]])
    assert "serialized" not in log and held <= H200.shared_bytes, held
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    # ptxas gives weights in registers no more than the least that any warp has.
    assert min(granted) >= (120 if consumers == 2 else 80), granted


def test_two_leaves_are_folded_in_registers():
    ptx, log, held = packed_kernel(INT4, PackedTile(128, 2, 64, 4), 0, cut=2, k=1536)
    wanted = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    check(ptx, log, "two leaves", [wanted])
    assert "serialized" not in log and held <= H200.shared_bytes, held
    assert ptx.count(wanted) == 2 * 4 * 64 // 16


@pytest.mark.parametrize("recipe", some_slow([INT4], list(PACKED)))
def test_numbers_are_written_along_k(recipe):
    bits, group, scale_rows, scales, *_ = PACKED[recipe]
    form = NumbersForm(recipe, bits, 16, 1, 128, group, scale_rows)
    types = {"codes": "*i32", "scales": f"*{scales}", "zeros": "*u8", "out": "*bf16"}
    types |= dict.fromkeys(("n", "k", "blocks"), "i32")
    multiples = "codes", "scales", "out", "n", "k"
    done = hopper_kernel(unpacked_weight, types, {"FORM": form}, multiples, {"num_warps": 4})
    assert "st.global.v4.b32" in done.ptx and "0 bytes spill stores" in done.log
