"""The shape table: its text, which choice a row count gets, and admission at start-up."""

import json
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.driverless import compile_for_hopper, take_gpu_kernels
from tpdet.kernels.cpu.pointwise.activation import activate_and_multiply
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.cost.static import column_tile
from tpdet.kernels.cuda.gemm import admission, trial_data
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm import gated as gated_gemm
from tpdet.kernels.cuda.gemm.choice import library as library_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table, tile_text
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, Admitted, ProductChoice, ShapeTable
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import ProductShape
from tpdet.kernels.cuda.pointwise import activation
from tpdet.kernels.inputs.product import Product

ENVIRONMENT = {"gpu": "Some GPU", "torch": "1", "cublas": "13.1.0"}
COLUMN, HEAD = Product("column", 96, 64), Product("head", 2064, 64)
GATED = Product("gated", 96, 64)
TILE = Tile(16, 64, 64, 4, 5, "pointer_swapped")
LIMITS = {"column": 512, "head": 8}


def table_text(**changes):
    row = {"tile": "16x64x64 w4 s5 swap", "library": "mm"}
    product = {"kind": "column", "n": 96, "k": 64, "leaves": 1, "dtype": "bfloat16",
               "rows": {"16": row, "512": row}}  # fmt: skip
    data = {"format": 2, "environment": ENVIRONMENT, "products": [product]}
    for path, value in changes.items():
        place = data
        *names, last = path.split("__")
        for name in names:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text", ["16x64x128 w4 s5 swap", "128x256x64 w8 s3 tma h2", "64x64x128 w4 s4 swap tma c2"]
)
def test_a_tile_is_written_as_it_is_read(text):
    assert tile_text.format_tile(tile_text.parse_tile(text)) == text


@pytest.mark.parametrize(
    "text", ["", "16x64 w4 s5", "16x64x64 w4 s5 tma swap", "16x64x64 w4 s5 h1", "16x64x64 w4 s5 x"]
)
def test_another_tile_is_refused(text):
    with pytest.raises(ValueError):
        tile_text.parse_tile(text)


def test_a_table_is_read():
    table = shape_table.parse_table(table_text(), "here")
    assert table.environment == ENVIRONMENT
    assert table.products[COLUMN] == {m: ProductChoice(m, TILE, "mm") for m in (16, 512)}


def test_a_gated_product_is_read():
    table = shape_table.parse_table(table_text(products__0__kind="gated"), "here")
    assert list(table.products) == [GATED] and GATED.outputs == 48


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"products__0__kind": "other"},
        {"products__0__n": -1},
        {"products__0__dtype": "float16"},
        {"products__0__rows": {}},
        {"products__0__rows": {"17": {"tile": "16x64x64 w4 s5"}}},
        {"products__0__rows__16__library": "magma"},
        {"products__0__rows__16__tile": "large"},
        {"products": [{}]},
    ],
)
def test_a_damaged_table_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=r"the\.json.*tpdet tune"):
        shape_table.parse_table(table_text(**changes), "the.json")
    with pytest.raises(ValueError, match=r"the\.json"):
        shape_table.parse_table("{", "the.json")


def test_a_gpu_has_its_own_table(tmp_path):
    assert shape_table.load_table("Some GPU", tmp_path) is None
    path = shape_table.table_path("Some GPU", tmp_path)
    assert path.name == "some-gpu.json"
    path.write_text(table_text())
    assert shape_table.load_table("Some GPU", tmp_path).products
    assert shape_table.load_table("some gpu", tmp_path) is None  # another name, one file name


def test_committed_tables_can_be_read():
    for path in shape_table.FOLDER.glob("*.json"):
        text = path.read_text()
        table = shape_table.parse_table(text, str(path))
        assert shape_table.table_path(table.environment["gpu"]) == path
        assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_rows_fall_into_the_next_bucket():
    buckets = [shape_table.bucket_of(m) for m in (1, 3, 16, 17, 257, 8192, 100_000)]
    assert buckets == [1, 4, 16, 24, 512, 8192, 8192]
    assert shape_table.bucket_of(100, (16, 64)) == 64


@pytest.mark.parametrize(
    ("m", "bucket", "rows"),
    [(64, 64, 64), (63, 64, None), (250, 256, 256), (224, 256, 256), (223, 256, None),
     (193, 256, None), (4000, 4096, 4096), (9000, 8192, None)],
)  # fmt: skip
def test_a_library_runs_at_its_bucket_only(m, bucket, rows):
    assert shape_table.library_rows(m, bucket) == rows


def test_what_is_not_admitted_does_not_run():
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert Admitted({}).choice("column", x, 96) is None
    admitted = Admitted({COLUMN: {4: ProductChoice(4, TILE), 16: ProductChoice(16, TILE, "mm")}})
    assert admitted.choice("column", x, 96).bucket == 4
    assert admitted.choice("column", x.repeat(30, 1), 96).bucket == 16
    assert admitted.choice("head", x, 96) is None and admitted.choice("gated", x, 96) is None
    assert admitted.choice("column", x, 95) is None
    assert admitted.choice("column", x.half(), 96) is None


@pytest.mark.parametrize("way", library_gemm.LIBRARIES)
def test_pad_rows_change_nothing(way):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = library_gemm.library_product(torch.cat([x, x[:3]]), weight, x.dtype, 8, way)
    assert_same_bits(library_gemm.library_product(x, weight, x.dtype, 8, way), wide[:5], way)
    with pytest.raises(ValueError, match="larger bucket"):
        library_gemm.library_product(x, weight, x.dtype, 4, way)
    with pytest.raises(ValueError, match="mm"):
        library_gemm.library_product(x, weight, torch.float32, 8, "other")


def test_operands_that_lie_otherwise_are_no_library_s():
    base = torch.zeros(64 * 64 + 128, dtype=torch.bfloat16)
    first = (-base.data_ptr() % 256) // 2
    x = base[first : first + 64 * 32].view(32, 64)
    assert library_gemm.library_fits(x, x)
    assert not library_gemm.library_fits(x[:, :32], x)
    assert not library_gemm.library_fits(base[first + 8 :][: 64 * 32].view(32, 64), x)


def run_column(monkeypatch, m, bias=None, admitted=None):
    """Which way a product of m rows takes: a library's rows or a tile."""
    taken = []
    monkeypatch.setattr(gemm, "library_fits", lambda *_: True)
    monkeypatch.setattr(gemm, "descriptor_sms", lambda *_: 0)
    monkeypatch.setattr(gemm, "library_product", lambda x, w, out, rows, way: taken.append(rows))
    monkeypatch.setattr(gemm, "run_chain", lambda operands, tile, sms: taken.append(tile))
    x = torch.zeros(m, 64, dtype=torch.bfloat16)
    gemm.column_gemm(x, torch.zeros(96, 64, dtype=torch.bfloat16), bias, x.dtype, None, admitted)
    return taken[0]


def test_a_product_takes_the_admitted_way(monkeypatch):
    static = run_column(monkeypatch, 16)
    fed = Tile(64, 64, 64, 4, 4, "descriptor")
    admitted = Admitted(
        {
            COLUMN: {
                16: ProductChoice(16, TILE, "mm"),
                64: ProductChoice(64, fed),
                512: ProductChoice(512, TILE, "mm"),
            }
        }
    )
    run = partial(run_column, monkeypatch, admitted=admitted)
    assert run(16) == 16
    assert run(15) == TILE
    assert run(16, torch.zeros(96)) == TILE  # the bias is added in fp32
    assert run(500) == 512
    assert run(300) == TILE
    found = run(60)  # no descriptors for these operands
    assert isinstance(found, Tile) and not variant_of(found).descriptors and found != fed
    assert run_column(monkeypatch, 16, admitted=Admitted({})) == static


def run_gated(monkeypatch, m, admitted=None, sms=0, fits=True):
    """The same of a gated product of m rows: a library's rows or a tile."""
    taken = []
    monkeypatch.setattr(gemm, "library_fits", lambda *_: fits)
    monkeypatch.setattr(gemm, "descriptor_sms", lambda *_: sms)
    monkeypatch.setattr(
        gated_gemm, "gated_library_product", lambda x, w, rows, way, activation: taken.append(rows)
    )

    def chain(operands, tile, sms):
        x, _, bias, y = operands[:4]
        assert operands.gated and bias is None and y.shape == (1, m, 48) and y.dtype == x.dtype
        taken.append(tile)

    monkeypatch.setattr(gemm, "run_chain", chain)
    x = torch.zeros(m, 64, dtype=torch.bfloat16)
    gated_gemm.gated_gemm(x, torch.zeros(96, 64, dtype=torch.bfloat16), None, admitted)
    return taken[0]


def test_a_gated_product_takes_the_admitted_way(monkeypatch):
    """Only an entry of its own kind: a column product of the same shape is another."""
    fed = Tile(64, 64, 64, 4, 4, "descriptor")
    rows = {
        16: ProductChoice(16, TILE, "mm"),
        64: ProductChoice(64, fed),
        512: ProductChoice(512, TILE, "mm"),
    }
    run = partial(run_gated, monkeypatch, admitted=Admitted({GATED: rows}))
    assert (run(16), run(500), run(15), run(300)) == (16, 512, TILE, TILE)
    assert run(16, fits=False) == TILE
    assert run(60, sms=132) == fed
    found = run(60)  # no descriptors for these operands
    assert found == run_gated(monkeypatch, 60) and not variant_of(found).descriptors
    static = run_gated(monkeypatch, 16)
    assert run_gated(monkeypatch, 16, Admitted({COLUMN: rows})) == static != 16


@pytest.mark.parametrize("n", [24, 8, 40])
def test_a_gated_product_is_pairs_of_eights(n):
    x, weight = torch.zeros(2, 64).bfloat16(), torch.zeros(n, 64).bfloat16()
    with pytest.raises(ValueError, match=f"{n} interleaved rows"):
        gated_gemm.gated_gemm(x, weight)


def test_the_static_choice_of_gated_products_fits_them():
    """What runs without a table: every row count, with and without descriptors."""
    for n, k in ((96, 64), (2368, 2880), (2880, 2368), (6144, 4096), (57344, 8192)):
        for m in BUCKETS:
            for sms in (0, 132):
                tile = column_tile(m, n, k, float32=False, wide_out=False, sms=sms)
                shape = ProductShape(m, n, k, 1, 2, True)
                assert variant_of(tile).fits(shape, tile, hardware.H200), (m, n, tile)
                float_tile = column_tile(m, n, k, float32=True, wide_out=True, sms=0)
                assert float_tile.columns % 16 == 0 and not variant_of(float_tile).descriptors


def exact(x, weight, bias, out_dtype, variant=None):
    return (x.float() @ weight.float().t()).to(out_dtype)


def exact_gated(x, weight, variant=None, activation="silu"):
    return activate_and_multiply(x.float() @ weight.float().t(), x.dtype)


@pytest.fixture
def machine(monkeypatch):
    """Admission on the CPU: products by torch, the environment of the table."""
    monkeypatch.setattr(admission, "column_gemm", exact)
    monkeypatch.setattr(
        admission, "library_product", lambda x, w, out, rows, way: exact(x, w, None, out)
    )
    monkeypatch.setattr(admission, "gated_gemm", exact_gated)
    monkeypatch.setattr(
        admission, "gated_library_product", lambda x, w, rows, way, activation: exact_gated(x, w)
    )
    monkeypatch.setattr(admission, "environment", lambda device: dict(ENVIRONMENT))
    return torch.device("cpu")


def a_table(**environment):
    rows = {
        8: ProductChoice(8, TILE, "mm"),
        512: ProductChoice(512, TILE, "mm"),
        1024: ProductChoice(1024, TILE, "mm"),
    }
    return ShapeTable(
        ENVIRONMENT | environment, {COLUMN: rows, HEAD: {8: ProductChoice(8, TILE)}, GATED: rows}
    )


def test_what_the_model_uses_is_tried_and_admitted(machine):
    other = Product("column", 32, 64)
    rows = Product("row", 64, 16, 4, "0+1 2+3")
    wanted = [COLUMN, HEAD, GATED, other, rows]
    found = admission.check(wanted, machine, LIMITS, table=a_table())
    assert (found.tried, found.not_in_table, found.library_off) == (5, (other, rows), None)
    assert "column 32x64" in str(found)
    x = torch.zeros(512, 64, dtype=torch.bfloat16)
    assert found.admitted.choice("column", x, 96).library == "mm"
    assert found.admitted.choice("head", x, 2064).bucket == 8
    assert found.admitted.choice("gated", x, 96).library == "mm"


def test_a_rehearsal_asks_for_what_follows_a_library_s_product(machine, monkeypatch, tmp_path):
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    with recording() as asked:
        activation.activate_and_multiply(torch.zeros(8, GATED.n), torch.bfloat16)
    with recording() as rehearsed:
        admission.rehearse([COLUMN, GATED], machine, LIMITS, table=a_table())
    assert len(asked) == 1 and set(asked) <= set(rehearsed)
    with recording() as rehearsed:
        admission.rehearse([COLUMN], machine, LIMITS, table=a_table())
    assert not set(asked) & set(rehearsed)


@pytest.mark.parametrize("kind", trial_data.KINDS)
def test_an_entry_with_other_bits_stops_the_start_by_name(machine, monkeypatch, kind):
    def wrong(x, weight, out, rows, way):
        y = exact(x, weight, None, out)
        odd = trial_data.trial_rows(kind, 512, 64, x.device)[: len(x)]
        if len(x) == 512 and same_bits(odd, x):
            y.view(torch.int16)[400, 95] ^= 1
        return y

    monkeypatch.setattr(admission, "library_product", wrong)
    with pytest.raises(RuntimeError, match=f"column 96x64, 512 rows, library mm, {kind} data"):
        admission.check([COLUMN], machine, LIMITS, table=a_table())


@pytest.mark.parametrize("kind", trial_data.KINDS)
@pytest.mark.parametrize("by", ["tile", "library"])
def test_a_gated_entry_with_other_bits_stops_the_start_by_name(machine, monkeypatch, kind, by):
    """The last of 48 outputs, in one row, on one kind of data."""
    odd = trial_data.trial_rows(kind, 512, 64, machine)

    def wrong(x, weight, *way, **activation):
        y = exact_gated(x, weight)
        if len(x) == 512 and way != (admission.REFERENCE.at(64),) and same_bits(odd, x):
            y.view(torch.int16)[400, 47] ^= 1
        return y

    replaced = "gated_gemm" if by == "tile" else "gated_library_product"
    monkeypatch.setattr(admission, replaced, wrong)
    named = "16x64x64 w4 s5 swap" if by == "tile" else "library mm"
    with pytest.raises(RuntimeError, match=f"gated 96x64, 512 rows, {named}, {kind} data"):
        admission.check([GATED], machine, LIMITS, table=a_table())


def test_a_tile_that_does_not_run_stops_the_start_by_name(machine, monkeypatch):
    def broken(x, weight, bias, out_dtype, variant=None):
        if variant == TILE:
            raise RuntimeError("out of resources")
        return exact(x, weight, bias, out_dtype)

    monkeypatch.setattr(admission, "column_gemm", broken)
    with pytest.raises(RuntimeError, match=r"head 2064x64, 8 rows, 16x64x64 w4 s5 swap.*out of"):
        admission.check([HEAD], machine, LIMITS, table=a_table())


@pytest.mark.parametrize("name", ["gpu", "torch", "cublas"])
def test_library_entries_count_in_their_environment_only(machine, name):
    found = admission.check([COLUMN], machine, LIMITS, table=a_table(**{name: "another"}))
    assert found.library_off.startswith(name) and "no library" in str(found)
    x = torch.zeros(512, 64, dtype=torch.bfloat16)
    choice = found.admitted.choice("column", x, 96)
    assert choice.tile == TILE and choice.library is None


def test_without_a_table_everything_is_reported(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no such GPU")
    found = admission.check([HEAD, COLUMN], machine, LIMITS)
    assert found.not_in_table == (COLUMN, HEAD) and found.tried == 0
    table = a_table()
    found = admission.check([COLUMN], machine, LIMITS, dtype=torch.float16, table=table)
    assert found.not_in_table == (COLUMN,)


@pytest.mark.parametrize("n", [96, 2048, 4096, 5000])
def test_a_difference_is_found_wherever_it_is(n):
    cpu = torch.device("cpu")
    weight = trial_data.trial_weight("random", n, 16, cpu)
    assert weight.shape == (n, 16) and weight.is_contiguous()
    wanted = torch.randn(4, min(n, trial_data.BASE_ROWS)).bfloat16()
    y = wanted.repeat(1, 3)[:, :n].contiguous()
    assert not trial_data.differs(y, wanted)
    for column in (0, n // 2, n - 1):
        other = y.clone()
        other.view(torch.int16)[3, column] ^= 1
        assert trial_data.differs(other, wanted)
    assert trial_data.differs(-torch.zeros_like(y), torch.zeros_like(wanted))


def test_cancelling_data_cancels():
    cpu = torch.device("cpu")
    x = trial_data.trial_rows("cancelling", 4, 256, cpu).double()
    w = trial_data.trial_weight("cancelling", 32, 256, cpu).double()
    assert ((x @ w.t()).abs() < 0.05 * (x.abs() @ w.abs().t())).all()


def test_the_version_of_a_library_is_unknown_without_one():
    assert library_gemm.cublas_version() == "unknown" or torch.version.cuda
