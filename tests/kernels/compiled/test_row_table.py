"""Row products in the shape table: text, which cut runs, admission, tuning by made-up times."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tpdet.kernels import order
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm import admission, trial_data
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.choice import library as library_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice, cut_roots
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted, ProductChoice, ShapeTable
from tpdet.kernels.cuda.gemm.choice.variants import FOLDS, variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.pointwise import finish
from tpdet.kernels.inputs.product import Product, read_roots, write_roots
from tpdet.kernels.partial_sums import PartialSums, relative_roots
from tpdet.tools.tune import leaf_operands, measure, run
from tpdet.tools.tune.products import TunedProduct, TunedRow
from tpdet.tools.tune.run import Effort, tune_products
from tpdet.tools.tune.table_file import write_table

PAIRS = Product("row", 96, 32, 4, "(0+1)+(2+3)")
APART = Product("row", 96, 32, 4, "0 1 2 3")
CHAIN = Product("row", 96, 32, 4, "((0+1)+2)+3")
SMALL = Tile(16, 64, 32, 4, 5, "pointer_swapped")
FED = Tile(16, 64, 16, 4, 5, "descriptor_swapped")
LIMITS = {"column": 64, "head": 8}
ENVIRONMENT = {"gpu": "A GPU", "torch": "1", "cublas": "13.1.0"}


def test_roots_are_written_as_they_are_read():
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4, 8):
            for roots in order.fold_plan(name, 16, ranks).roots:
                text = write_roots(roots)
                assert read_roots(text) == roots
    assert write_roots((((0, 1), 2), 3)) == "(0+1)+2 3"


@pytest.mark.parametrize(
    "text", ["", "(0+1)", "0+1+2", "0 +1", "a", "0+1)", "(0+1", "00", "((0+1))+2", "0++1", "0  1"]
)
def test_other_roots_are_refused(text):
    with pytest.raises(ValueError):
        read_roots(text)


def table_text(**changes):
    row = {"tile": "16x64x32 w4 s5 swap", "cut": 2, "kernel": "flat"}
    product = {"kind": "row", "n": 96, "k": 32, "leaves": 4, "dtype": "bfloat16",
               "roots": "(0+1)+(2+3)", "rows": {"16": row}}  # fmt: skip
    for name, value in changes.items():
        (row if name in (*row, "library") else product)[name] = value
    return json.dumps({"format": 2, "environment": ENVIRONMENT, "products": [product]})


def test_a_row_product_is_read():
    table = shape_table.parse_table(table_text(), "here")
    choice = table.products[PAIRS][16]
    assert choice == ProductChoice(16, SMALL, None, 2, "flat")
    assert choice.leaf_choice == LeafChoice(2, "flat", SMALL)


@pytest.mark.parametrize("changes", [
    {"roots": "0+1"}, {"roots": ""}, {"roots": "0+1 3+2"}, {"roots": 3}, {"cut": 0}, {"cut": "2"},
    {"kernel": "parked"}, {"library": "mm"},
])  # fmt: skip
def test_a_damaged_row_product_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=r"the\.json.*tpdet tune"):
        shape_table.parse_table(table_text(**changes), "the.json")


def taken(monkeypatch, m, product=PAIRS, sms=132, admitted=None):
    """What `leaf_sums` of m rows runs: by how many sums, and the tile."""
    runs = []
    monkeypatch.setattr(leaf_gemm, "descriptor_sms", lambda *_: sms)
    monkeypatch.setattr(leaf_gemm, "run_chain", lambda operands, tile, sms: runs.append(tile))
    flat = replace(FOLDS["flat"], run=lambda of, form, tile, sms: runs.append(("flat", tile)))
    monkeypatch.setattr(leaf_gemm, "FOLDS", {"flat": flat})
    x = torch.zeros(m, product.leaves * product.k, dtype=torch.bfloat16)
    w = torch.zeros(product.leaves, product.n, product.k, dtype=torch.bfloat16)
    sums = leaf_gemm.leaf_sums(x, w, read_roots(product.roots), admitted=admitted)
    return sums.values.shape[0], runs[0]


def test_an_admitted_cut_runs_at_every_row_count_of_its_bucket(monkeypatch):
    static = taken(monkeypatch, 16)
    admitted = Admitted(
        {
            PAIRS: {
                16: ProductChoice(16, FED, None, 2, "flat"),
                64: ProductChoice(64, SMALL, None, 1, "chain"),
            }
        }
    )
    for m in (1, 9, 16):
        assert taken(monkeypatch, m, admitted=admitted) == (2, ("flat", FED))
    for m in (17, 40, 64, 500):
        assert taken(monkeypatch, m, admitted=admitted) == (4, SMALL)
    without = taken(monkeypatch, 16, sms=0, admitted=admitted)
    assert without[0] == 4 and not variant_of(without[1]).descriptors
    assert (
        taken(monkeypatch, 40, APART, admitted=admitted)[1] != SMALL
    )  # other roots are not in the table
    assert taken(monkeypatch, 16, admitted=Admitted({})) == static


def apart(x, weight, variant=None):
    return torch.einsum(
        "mlk,lnk->lmn", x.double().unflatten(1, (weight.shape[0], -1)), weight.double()
    ).float()


def sums_by_cut(x, weight, roots, choice=None):
    values = apart(x, weight)
    units, rest = cut_roots(roots, choice.cut)
    folded = [order.evaluate(unit, lambda i: values[i], torch.add) for unit in units]
    return PartialSums(torch.stack(folded), rest)


@pytest.fixture
def machine(monkeypatch):
    """Leaf products by torch, the environment of the table."""
    monkeypatch.setattr(leaf_gemm, "leaf_gemm", apart)
    monkeypatch.setattr(leaf_gemm, "leaf_sums", sums_by_cut)
    monkeypatch.setattr(admission, "environment", lambda device: dict(ENVIRONMENT))
    return torch.device("cpu")


def a_table():
    rows = {
        8: ProductChoice(8, FED, None, 4, "flat"),
        64: ProductChoice(64, SMALL, None, 2, "nested"),
        256: ProductChoice(256, SMALL, None, 1, "chain"),
    }
    return ShapeTable(
        ENVIRONMENT, {PAIRS: rows, APART: {64: ProductChoice(64, SMALL, None, 1, "chain")}}
    )


def test_the_cuts_that_a_rank_uses_are_tried_and_admitted(machine):
    found = admission.check([PAIRS, APART, CHAIN], machine, LIMITS, table=a_table())
    assert (found.tried, found.not_in_table) == (3, (CHAIN,))
    assert "row 96x32 ((0+1)+2)+3" in str(found)
    x = torch.zeros(5, 128, dtype=torch.bfloat16)
    roots = read_roots(PAIRS.roots)
    assert found.admitted.leaf_choice(x, 96, 4, roots) == LeafChoice(4, "flat", FED)
    assert found.admitted.leaf_choice(x.half(), 96, 4, roots) is None


@pytest.mark.parametrize("kind", trial_data.KINDS)
def test_a_cut_with_other_bits_stops_the_start_by_name(machine, monkeypatch, kind):
    odd = trial_data.trial_rows(kind, 64, 128, machine)

    def wrong(x, weight, roots, choice):
        sums = sums_by_cut(x, weight, roots, choice)
        if choice.cut == 2 and torch.equal(x.view(torch.int16), odd.view(torch.int16)):
            sums.values[1].view(torch.int32)[63, 95] ^= 0x7F000000
        return sums

    monkeypatch.setattr(leaf_gemm, "leaf_sums", wrong)
    name = f"row 96x32 {PAIRS.roots}, 64 rows, cut 2 nested 16x64x32 w4 s5 swap, {kind} data"
    with pytest.raises(RuntimeError, match=re.escape(name)):
        admission.check([PAIRS], machine, LIMITS, table=a_table())


def test_a_cut_that_folds_in_another_order_or_does_not_run_stops_the_start(machine, monkeypatch):
    def chained(x, weight, roots, choice):
        return sums_by_cut(x, weight, read_roots(CHAIN.roots), LeafChoice(4, "", FED))

    def broken(x, weight, roots, choice):
        raise ValueError("out of registers")

    for sums, said in ((chained, "8 rows, cut 4 flat"), (broken, "out of registers")):
        monkeypatch.setattr(leaf_gemm, "leaf_sums", sums)
        with pytest.raises(RuntimeError, match=said):
            admission.check([PAIRS], machine, LIMITS, table=a_table())


def test_row_products_stand_in_the_file_by_their_roots(tmp_path):
    path = tmp_path / "gpu.json"
    row = TunedRow(ProductChoice(16, FED, None, 2, "flat"), 1.0, 1.0, 2.0)
    small = TunedRow(ProductChoice(16, SMALL), 1.0, 1.0, 2.0)
    write_table(path, {"gpu": "A"}, [TunedProduct(Product("column", 96, 64), {16: small})])
    write_table(path, {"gpu": "A"}, [TunedProduct(each, {16: row}) for each in (PAIRS, CHAIN)])
    table = shape_table.parse_table(path.read_text(), "file")
    assert set(table.products) == {Product("column", 96, 64), PAIRS, CHAIN}
    assert table.products[CHAIN][16] == row.choice
    entry = json.loads(path.read_text())["products"][0]
    assert "roots" not in entry and "cut" not in entry["rows"]["16"]


def test_a_whole_run_on_a_made_up_gpu(machine, monkeypatch, tmp_path, capsys):
    """All but kernels and clock: nested is fastest and wrong, then whole roots, then cuts of 2."""
    clock, said = {8: 1.0, 4: 1.0, 2: 2.0, 1: 3.0}, []

    def sums(x, weight, roots, choice):
        said.append((choice.kernel, choice.cut))
        found = sums_by_cut(x, weight, roots, choice)
        return PartialSums(-found.values, found.roots) if choice.kernel == "nested" else found

    def capture(run, weights):
        said.clear()
        run(weights[0])
        return said[0] if said else "peer"

    def times(graphs, calls, repeats):
        return [9.0 if g == "peer" else clock[g[1]] - 0.5 * (g[0] == "nested") for g in graphs]

    cuda = {"get_device_name": "A GPU", "get_device_capability": (9, 0), "synchronize": None,
            "empty_cache": None, "get_device_properties": SimpleNamespace(
                name="A GPU", multi_processor_count=132, major=9, minor=0)}  # fmt: skip
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    monkeypatch.setattr(library_gemm, "cublas_version", lambda: "13.1.0")
    monkeypatch.setattr(admission, "environment", library_gemm.environment)
    monkeypatch.setattr(leaf_gemm, "leaf_sums", sums)
    monkeypatch.setattr(finish, "fold_and_norm", lambda *_: None)
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "interleaved_us", times)
    monkeypatch.setattr(run, "compile_all_of", lambda launches: (0, 0))
    wide = {product: Product("row", 96, 128, 4, product.roots) for product in (APART, CHAIN, PAIRS)}
    path = tmp_path / "a-gpu.json"
    tune_products(list(wide.values()), Effort(96, 3), torch.device("cpu"), path)
    printed = capsys.readouterr().out
    assert "other bits, not used: cut 4 nested 64x256x64 w4 s4 tma at 48" in printed
    assert "30 entries of the shape table admitted" in printed and "96:0.11/4" in printed
    table = shape_table.parse_table(path.read_text(), "file")
    cuts = {
        product: {choice.cut for choice in table.products[product].values()}
        for product in table.products
    }
    assert cuts == {wide[APART]: {1}, wide[CHAIN]: {1, 4}, wide[PAIRS]: {1, 4}}
    kernels = {choice.kernel for p in table.products.values() for choice in p.values()}
    assert kernels == {"chain", "flat"}


def test_one_kernel_is_measured_once_for_all_roots():
    roots = [
        relative_roots(order.fold_plan(name, 4, 1).roots[0]) for name in ("sequential", "pairs")
    ]
    works = [
        set(leaf_operands.bucket_choices(product, mine, 64, hardware.H200))
        for product, mine in zip((CHAIN, PAIRS), roots, strict=True)
    ]
    shared = works[0] & works[1]
    assert shared and all(work.split()[0].endswith(".1.1.1") for work in shared)
    assert all(form.leaves > 1 for form, _, _ in works[0] ^ works[1])
