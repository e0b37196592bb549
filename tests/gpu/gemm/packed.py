"""Products by packed weights on a GPU: bits of every form and tile."""

from functools import partial

import torch

from tests.gpu.lib.checks import Differences, gives, same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_tile
from tpdet.kernels.cuda.gemm.leaf import leaf_gemm, leaf_sums
from tpdet.kernels.cuda.gemm.leaf_trials import folded
from tpdet.kernels.cuda.gemm.packed.admission import drawn_weight, failing_tiles
from tpdet.kernels.cuda.gemm.packed.choice import PackedWay, fits
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile, run_packed
from tpdet.kernels.cuda.gemm.packed.product import in_scratch, packed_product, packed_sums
from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    INT8,
    OrderedForm,
)
from tpdet.kernels.inputs.ordering import ordered_weight
from tpdet.kernels.inputs.packed import PackedMatrix, pack
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import fold_plan
from tpdet.kernels.partial_sums import PartialSums

FORMS = {
    "fp8": (E4M3, 8, 128, 8, "bfloat16"),
    "fp8 of fp32": (E4M3, 8, 128, 8, "float32"),
    "int4": (INT4, 4, 128, 1, "bfloat16"),
    "int4 of fp16": (INT4_OF_HALF, 4, 128, 1, "float16"),
    "mxfp4": (E2M1, 4, 32, 1, "uint8"),
    "int4 with zero points": (INT4_ZERO, 4, 128, 1, "bfloat16"),
    "int4 of fp16 with zero points": (INT4_ZERO_OF_HALF, 4, 128, 1, "float16"),
    "int8": (INT8, 8, 128, 1, "bfloat16"),
}
SHAPES = {
    "gate_up": ("gated", (1, 24576, 4096)), "down": ("row", (8, 4096, 1536)),
    "qkv": ("column", (1, 6144, 4096)), "o": ("row", (8, 4096, 512)),
}  # fmt: skip
ROOTS = fold_plan("tree", 8, 1).roots[0]
CANDIDATES = (
    PackedTile(8, 1, 128, 4), PackedTile(8, 1, 64, 6), PackedTile(16, 1, 128, 4),
    PackedTile(16, 1, 64, 6), PackedTile(32, 1, 64, 4), PackedTile(64, 1, 64, 4),
    PackedTile(64, 2, 64, 4), PackedTile(64, 2, 64, 6, True), PackedTile(128, 1, 64, 4),
    PackedTile(128, 2, 64, 4), PackedTile(128, 2, 64, 4, True), PackedTile(256, 2, 64, 4),
    PackedTile(256, 1, 64, 3), PackedTile(8, 1, 64, 6, programs=4),
    PackedTile(16, 1, 64, 6, programs=3), PackedTile(64, 1, 64, 4, programs=3),
    PackedTile(8, 1, 128, 6, programs=1, turns=True),
    PackedTile(16, 1, 128, 4, programs=2, turns=True),
    PackedTile(64, 1, 128, 4, programs=1, turns=True), PackedTile(128, 3, 64, 6, True),
)  # fmt: skip
"""Tiles worth measuring."""
_FINITE = 2.0**117  # scales under it keep all numbers in bf16


def form_of(name, shape):
    return OrderedForm(*FORMS[name], shape)


def products_are_the_dense_ones(name, shape_name):
    """Every candidate tile, at row counts that do not fill tiles."""
    found = Differences()
    for kind, (leaves, _, k) in [SHAPES[shape_name]]:
        weight, numbers = drawn_weight(form_of(name, (leaves, 528, k)), torch.device("cuda"))
        found.keep(same, in_scratch(weight), numbers, f"numbers {k}")
        for rows in (1, 7, 16, 33, 64, 100, 256, 300):
            for data in trial_data.KINDS:
                x = trial_data.trial_rows(data, rows, leaves * k, numbers.device)
                if kind == "row":
                    leaf_sum = leaf_gemm(x, numbers, REFERENCE.at(k))
                    wanted = folded(PartialSums(leaf_sum, ROOTS))
                else:
                    wanted = by_tile(kind, x, numbers[0], REFERENCE.at(k))
                for tile in CANDIDATES:
                    if fits(tile, k) and tile.rows < 4 * rows + 8:
                        for cut in cuts_of(kind, tile):
                            run = product_by(kind, x, tile, cut)
                            what = f"{kind} {rows} rows {data} {tile} cut {cut}"
                            found.keep(gives, partial(_whole, run, weight), wanted, what)
    return found.finish()


def cuts_of(kind, tile):
    """Leaves that a program of a tile folds: two fit its registers, four its shared memory."""
    if kind != "row" or tile.rows > 128 or tile.turns or tile.groups == 3:
        return (1,)
    return (1, 2, 4) if tile.specialised else (1, 2)


def _whole(run, weight):
    found = run(weight)
    return folded(found) if isinstance(found, PartialSums) else found


def every_number_is_the_rule_s(name):
    """All codes, by all zero points, by all 16-bit scales that stay finite (of fp32: 32,768 drawn).

    y = 1 w.
    """
    recipe, bits, group, _, dtype = FORMS[name]
    zeroed, scales = recipe in (INT4_ZERO, INT4_ZERO_OF_HALF), every_scale(dtype)
    n, k = len(scales), 17 * 64 if zeroed else 256
    group = 32 if zeroed else group
    codes = torch.arange(k, device="cuda").to(torch.uint8).expand(n, k).clone()
    if recipe == E4M3:
        codes = torch.where(codes & 127 == 127, 0, codes)
    packed = pack(codes if bits == 8 else codes & 15, bits)
    by_group, zeros = scales[:, None].expand(-1, k // group), None
    kind = {E4M3: "e4m3", E2M1: "e2m1"}.get(recipe, "int")
    zero = (0 if zeroed else 1 << (bits - 1)) * (kind == "int")
    if zeroed:
        zeros, zero = pack((torch.arange(k // group, device="cuda") // 2 % 16).expand(n, -1), 4), 1
    matrix = PackedMatrix(
        kind, bits, packed, range(k), by_group, group, zeros=zeros, zero=zero, dtype=torch.bfloat16
    )
    wanted = matrix.numbers().bfloat16() + 0.0  # a chain begins at +0: -0 is gone
    weight = ordered_weight([matrix])
    one = torch.eye(k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(1, k, n, dtype=torch.bfloat16, device="cuda")
    for tile in (PackedTile(64, 1, 64, 4), PackedTile(64, 2, 64, 6, True)):
        run_packed(one, weight, None, y, tile)
        same(y[0].T, wanted, f"{n} rows by {len(scales)} scales by {tile}")
    same(in_scratch(weight)[0] + 0.0, wanted, "unpacked")
    return f"{len(scales)} scales"


def every_scale(dtype):
    if dtype == "uint8":
        return torch.arange(192, dtype=torch.uint8, device="cuda")
    if dtype == "float32":
        drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 15,), device="cuda")
        scales = drawn.int().view(torch.float32)
    else:
        scales = torch.arange(-(2**15), 2**15, device="cuda").short().view(getattr(torch, dtype))
    scales = scales[scales.float().isfinite() & (scales.float().abs() < _FINITE) & (scales != 0)]
    return scales[: len(scales) // 64 * 64]


def a_flipped_code_or_scale_is_found():
    """The start-up check's comparison sees one nibble, and one scale."""
    weight, numbers = drawn_weight(form_of("int4", (1, 528, 4096)), torch.device("cuda"))
    x = trial_data.trial_rows("random", 16, 4096, numbers.device)
    tile = PackedTile(16, 1, 64, 6)
    wanted = packed_product("column", x, weight, None, torch.bfloat16, tile)
    for change in (weight.codes.view(-1)[5:6], weight.scales.view(-1)[300:301]):
        kept = change.clone()
        change.copy_(kept * 2 if change.is_floating_point() else kept ^ 8)
        found = packed_product("column", x, weight, None, torch.bfloat16, tile)
        if torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
            raise AssertionError("a change reached no bit")
        change.copy_(kept)
    same(packed_product("column", x, weight, None, torch.bfloat16, tile), wanted, "put back")


def a_start_admits_them():
    forms = [form_of(name, shape) for name in FORMS for _, shape in SHAPES.values()]
    products = [Product(kind, n, k, leaves) for kind, (leaves, n, k) in SHAPES.values()]
    tried, failed = failing_tiles(forms, products, 512, torch.device("cuda"))
    if failed:
        raise AssertionError("; ".join(failed[:4]))
    return f"{tried} admitted"


def folded_leaves_are_the_dense_ones():
    for name in ("int4", "fp8"):
        weight, numbers = drawn_weight(form_of(name, SHAPES["o"][1]), torch.device("cuda"))
        for rows in (1, 64, 600):
            x = trial_data.trial_rows("random", rows, 4096, numbers.device)
            wanted = folded(leaf_sums(x, numbers, ROOTS))
            same(folded(leaf_sums(x, weight, ROOTS)), wanted, f"{name} {rows} rows")


def packed_checks():
    """The suite's checks of packed weights."""
    return [
        *(
            Check(f"{shape} of {name}", products_are_the_dense_ones, (name, shape))
            for name in FORMS
            for shape in SHAPES
        ),
        *(Check(f"numbers of {name}", every_number_is_the_rule_s, (name,)) for name in FORMS),
        Check("a flipped code or scale", a_flipped_code_or_scale_is_found),
        Check("admission of packed weights", a_start_admits_them),
        Check("folded leaves", folded_leaves_are_the_dense_ones),
    ]


def product_by(kind, x, tile, cut=1):
    """The product of packed weights by a tile, as a function of them."""
    if kind == "row":
        return lambda w: packed_sums(x, w, ROOTS, PackedWay(tile, cut))
    return lambda w: packed_product(kind, x, w, None, x.dtype, tile)
