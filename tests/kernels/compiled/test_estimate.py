"""Choices by estimate: which tile at which bucket, and where start-up admits the library."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.cost import model
from tpdet.kernels.cuda.cost.model import (
    TileCost,
    TileWork,
    cost_name,
    cost_of,
    load_microseconds,
    load_of,
)
from tpdet.kernels.cuda.gemm import admission, library_trials
from tpdet.kernels.cuda.gemm.choice import estimate
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, Admitted, ProductChoice
from tpdet.kernels.cuda.gemm.choice.tile_text import parse_tile
from tpdet.kernels.cuda.gemm.choice.variants import KERNELS, variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import ProductShape
from tpdet.kernels.inputs.product import HEAD_ROWS, Product
from tpdet.tools.tune.shapes import tuned_products, tuned_row_products

COST = TileCost(2.0, 0.4, 0.5, 1.0, 2.0, 4.0, 4.0)
WIDE = Tile(128, 256, 64, 4, 3, "warp_specialised")
ROWS = Product("row", 4096, 512, 8, "(((0+1)+(2+3))+(4+5))+(6+7)")


def time(cost, work):
    return load_microseconds(cost, load_of(hardware.H200, work))


def test_time_is_rounds_of_programs_or_bytes():
    work = TileWork(WIDE, "column", 128, 256 * 132, 4096)
    quick = COST._replace(bandwidth=100.0)
    one = time(quick, work)
    assert one == pytest.approx(2.0 + 64 * 0.5 + 1.0, rel=0.01)
    two = time(quick, work._replace(n=256 * 133))
    assert two == pytest.approx(one + 64 * 0.5 + 1.0, rel=0.01), "one program more, a round more"
    slow = COST._replace(bandwidth=0.1)
    assert time(slow, work) > 2 * 4096 * 256 * 132 / 0.1e6
    assert time(quick, work._replace(kind="gated")) > one, "an activation takes time"
    apart = TileWork(replace(WIDE, variant="descriptor"), "row", 8192, 4096, 512, 8, 1)
    assert time(COST, apart) > time(COST, apart._replace(units=1, cut=8))


GPU = replace(hardware.H200, name="a GPU of this test")


def test_the_least_estimate_is_chosen_and_what_has_no_cost_is_not(monkeypatch):
    product = Product("column", 6144, 4096)
    narrow, wide = "128x128x64 w4 s5 tma specialised", "128x256x64 w4 s3 tma specialised"
    costs = {
        f"column {narrow}": COST,
        f"column {wide}": COST._replace(step=0.7, latency=0.7),
        "head 128x256x64 w8 s3 tma h2": COST,
    }
    monkeypatch.setattr(model, "tile_costs", lambda gpu: costs)
    found = estimate.estimated_choices(product, 300, GPU)
    assert list(found) == [192, 256, 512], "candidates of fewer rows have no costs"
    assert found[192] == ProductChoice(192, parse_tile(narrow))
    many = estimate.estimated_choices(product, 8192, GPU)
    assert many[8192] == ProductChoice(8192, parse_tile(wide)), (
        "twice the work in less than twice the time"
    )
    assert not estimate.estimated_choices(ROWS, 8192, GPU)


def test_rows_of_output_that_no_descriptor_reaches_have_other_tiles():
    for columns, reached in ((1, False), (2, False), (4, True), (12, True)):
        found = estimate.estimated_choices(Product("head", columns, 2048), 256, GPU)
        variants = [variant_of(choice.tile).descriptors for choice in found.values()]
        assert variants and any(variants) is reached, columns


MEASURED = [path.stem for path in sorted(model.FOLDER.glob("*.json"))]


@pytest.mark.parametrize("gpu", MEASURED)
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-0.6b", "qwen3-32b", "llama-3-70b"])
def test_every_known_model_has_choices_that_fit(name, gpu):
    gpu = replace(hardware.H200, name=gpu)
    products = tuned_products([name], (1, 2)) + tuned_row_products([name], (1, 2), ("pairs",))
    for product in products:
        most = HEAD_ROWS if product.kind == "head" else 8192
        found = estimate.estimated_choices(product, most, gpu)
        assert list(found) == [bucket for bucket in BUCKETS if bucket <= most], product
        for bucket, choice in found.items():
            if product.kind != "row":
                bytes_out = 4 if product.kind == "head" else 2
                shape = ProductShape(
                    bucket, product.n, product.k, 1, bytes_out, product.kind == "gated"
                )
                assert variant_of(choice.tile).fits(shape, choice.tile, gpu), (product, choice)


def test_a_tile_whose_depth_k_cuts_costs_in_proportion():
    tile = Tile(16, 64, 128, 4, 5, "pointer_swapped")
    work = TileWork(tile, "row", 16, 96, 64, 2, 2, "flat")
    costs = {cost_name(work): COST}
    assert cost_of(costs, work) == COST
    half = cost_of(costs, work._replace(tile=replace(tile, depth=64)))
    assert half == COST._replace(step=COST.step / 2, latency=COST.latency / 2)
    for other in (replace(tile, stages=4), replace(tile, depth=256)):
        assert cost_of(costs, work._replace(tile=other)) is None


def test_a_gpu_without_costs_takes_those_of_the_h200():
    assert model.tile_costs("no such GPU") == model.tile_costs("NVIDIA H200")


@pytest.mark.parametrize("gpu", MEASURED)
def test_every_cost_is_of_a_tile_that_exists(gpu):
    for name, cost in model.tile_costs(gpu).items():
        group, cut, text = re.fullmatch(r"([a-z]+) (?:(\d) )?(\d+x.*)", name).groups()
        kernel = group if cut else ""
        tile, kind = parse_tile(text), "row" if cut else group
        work = TileWork(tile, kind, 1, 1, 1, cut=int(cut or 1), kernel=kernel)
        assert cost_name(work) == name and min(cost) > 0
        assert not kernel or kernel in KERNELS


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of whose products everything is by torch."""
    exact = lambda x, w, b, out, tile=None: (x.double() @ w.double().t()).to(out)
    monkeypatch.setattr(hardware, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(admission, "column_gemm", exact)
    return torch.device("cpu")


def test_what_no_table_holds_is_tried_and_admitted_by_estimate(hopper, monkeypatch):
    product, limits = Product("column", 512, 256), {"column": 60, "head": 8}
    found = admission.check([product], hopper, limits)
    assert found.not_in_table == (product,) and found.tried == 9
    assert "by estimate: column 512x256" in str(found)
    assert list(found.admitted.products[product]) == [b for b in BUCKETS if b <= 64]
    exact = admission.column_gemm
    wrong = lambda x, w, b, out, tile=None: exact(x, w, b, out) + (tile != admission.REFERENCE)
    monkeypatch.setattr(admission, "column_gemm", wrong)
    with pytest.raises(RuntimeError, match="column 512x256, 1 rows"):
        admission.check([product], hopper, limits)
    half = admission.check([product], hopper, limits, dtype=torch.float16)
    assert not half.admitted.products


def test_a_library_is_admitted_where_it_has_the_bits_and_is_faster(hopper, monkeypatch):
    """At 48 rows it is slower, at 64 another's bits, at 96 faster; fewer rows are never tried."""
    product = Product("column", 96, 64)
    tile = Tile(64, 32, 64, 4, 4)
    choices = {bucket: ProductChoice(bucket, tile) for bucket in (32, 48, 64, 96)}
    tried = []

    def library(x, w, out, rows, way):
        tried.append((rows, way))
        if way == "addmm":
            raise RuntimeError("no such way")
        return admission.column_gemm(x, w, None, out) + (rows == 64)

    def timer(runs):
        rows = len(runs[0]())
        return [1.0, 0.99 if rows == 48 else 0.9][: len(runs)]

    monkeypatch.setattr(admission, "library_product", library)
    admitted = Admitted({product: choices, ROWS: choices})
    found = library_trials.with_libraries(admitted, [product, ROWS], hopper, timer)
    libraries = {bucket: each.library for bucket, each in found.products[product].items()}
    assert libraries == {32: None, 48: None, 64: None, 96: "mm"}
    assert found.products[ROWS] == choices and {rows for rows, _ in tried} == {48, 64, 96}
    unasked = library_trials.with_libraries(admitted, [], hopper, timer)
    assert unasked.products[product] == choices
