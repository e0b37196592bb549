"""`tpdet tune` without a GPU: shapes, choices by made-up times, the file, the refusal."""

import json
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.lib.kernels.driverless import compile_for_hopper, take_gpu_kernels
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.source import open_weights
from tpdet.cli import main
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import NotFoundError, UsageError
from tpdet.kernels.cpu.pointwise.activation import activate_and_multiply
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.compile.pool import watching_compilations
from tpdet.kernels.cuda.gemm import admission, leaf_trials
from tpdet.kernels.cuda.gemm.choice import library as library_gemm
from tpdet.kernels.cuda.gemm.choice.library import GATED_LIBRARY_ROWS, LIBRARIES, library_ways
from tpdet.kernels.cuda.gemm.choice.shape_table import ProductChoice, parse_table
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.variants.pointer import pointer_chain
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.layers.gathered_linear import GatheredLinear
from tpdet.layers.linear import ColumnLinear, GatedLinear, RowLinear
from tpdet.layers.partition import make_partition
from tpdet.layers.vocabulary import VocabularyTable
from tpdet.models.decoder import Decoder
from tpdet.models.products import layer_products, rank_products, table_products
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.tune import column_operands, measure, products, run
from tpdet.tools.tune.column_operands import ColumnOperands
from tpdet.tools.tune.leaf_operands import LeafOperands
from tpdet.tools.tune.products import TunedCandidate, TunedProduct, TunedRow, launches
from tpdet.tools.tune.run import Effort, buckets_of, geometric_mean, groups, tune_products
from tpdet.tools.tune.shapes import (
    products_by_value,
    tuned_gathered_products,
    tuned_products,
    tuned_row_products,
)
from tpdet.tools.tune.table_file import append_times, write_table
from tpdet.tools.worlds.shapes import cut_for, find_model

COLUMN = Product("column", 96, 64)
FAST, SLOW = Tile(16, 64, 64, 4, 5, "pointer_swapped"), Tile(16, 64, 64, 4, 4, "pointer_swapped")


def test_it_is_refused_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--model-shape", "qwen3-8b"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_the_products_of_a_known_model():
    found = tuned_products(["qwen3-8b"], (1, 4))
    assert [str(product) for product in found] == [
        "column 1536x4096",
        "column 6144x4096",
        "gated 6144x4096",
        "gated 24576x4096",
        "head 37984x4096",
        "head 151936x4096",
    ]
    with pytest.raises(NotFoundError, match="'qwen9' is no directory"):
        tuned_products(["qwen9"], (1,))
    with pytest.raises(UsageError, match="tensor-parallel size 3"):
        tuned_products(["qwen3-8b"], (3,))


def test_the_row_products_of_every_rank_and_order():
    found = tuned_row_products(["qwen3-8b"], (1, 2, 4), ("sequential", "pairs"))
    roots = {(product.k, product.leaves, product.roots) for product in found}
    for k in (512, 1536):
        assert {(leaves, text) for width, leaves, text in roots if width == k} == {
            (8, "((((((0+1)+2)+3)+4)+5)+6)+7"),
            (8, "(((0+1)+(2+3))+(4+5))+(6+7)"),
            (4, "((0+1)+2)+3"),
            (4, "0 1 2 3"),
            (4, "(0+1)+(2+3)"),
            (4, "0+1 2+3"),
            (2, "0+1"),
            (2, "0 1"),
        }
    assert len(found) == 16 and [len(group) for group in groups(found)] == [2, 4, 2] * 2
    everything = found + tuned_products(["qwen3-8b"], (1,))
    assert sorted(chain.from_iterable(groups(everything))) == sorted(everything)


def test_without_descriptors_leaves_stay_apart_and_tiles_are_by_pointers(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.A100)
    row, cpu = Product("row", 96, 64, 4, "(0+1)+(2+3)"), torch.device("cpu")
    monkeypatch.setattr(leaf_trials, "wanted_roots", lambda *_: None)
    monkeypatch.setattr(column_operands, "by_tile", lambda *_: None)
    for operands in (LeafOperands([row], 8, cpu), ColumnOperands([COLUMN], 8, cpu)):
        [product] = operands.products
        for bucket in (1, 64, 2048):
            for each in operands.candidates(product, bucket).values():
                assert each.choice.cut <= 1 and each.choice.tile.variant.startswith("pointer")


def test_products_come_in_the_order_of_models_and_sizes_that_fit():
    found, left_out = products_by_value(
        ["qwen2.5-7b", "qwen3-0.6b"], (16, 2, 1), ("pairs",), ["fold"]
    )
    assert [str(p) for p in found[:3]] == [
        "column 2304x3584",
        "gated 18944x3584",
        "head 76032x3584",
    ]
    assert {p.k for p in found[-4:]} == {256, 384, 1024} and len(left_out) == 2
    assert "qwen2.5-7b: tensor-parallel size 16 does not fit" in left_out[0]
    with pytest.raises(UsageError, match="size 16 does not fit"):
        products_by_value(["qwen2.5-7b"], (16,), ("pairs",), ["fold"])


def test_every_rank_of_unequal_shares_is_tuned():
    """28 heads of 128 in 8 leaves: ranks of 3 and of 4; their sums of unequal leaves are not."""
    found, _ = products_by_value(["qwen2.5-7b"], (8,), ("pairs",), ["fold"])
    assert {p.n for p in found if p.kind == "column"} == {(3 + 2) * 128, (4 + 2) * 128}
    assert {p.k for p in found if p.kind == "row"} == {18944 // 8}


def test_kernels_are_recorded_and_compiled_once(monkeypatch, tmp_path):
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    caches = type(pointer_chain.device_caches)(pointer_chain.create_binder)
    monkeypatch.setattr(pointer_chain, "device_caches", caches)
    tile = Tile(16, 64, 64, 4, 3, "pointer_swapped")
    x, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (1, 96))
    jobs = [
        partial(admission.by_tile, "column", x, weight, tile),
        partial(admission.by_tile, "gated", x, weight, replace(tile, stages=4)),
        partial(admission.by_tile, "column", x, weight, replace(tile, depth=256)),
        partial(admission.by_tile, "head", x, weight, replace(tile, columns=48)),
    ]
    refusals = "a depth that does not divide K, and 48 columns, which are no power of two"
    assert measure.compile_all_of(jobs) == (3, 2), refusals
    with watching_compilations(lambda name: pytest.fail(f"{name} was not compiled ahead")):
        assert measure.compile_all_of(jobs[:2]) == (0, 0)


def test_what_is_compiled_ahead_is_every_tile_and_no_library(monkeypatch):
    operands = Made({FAST: 9.0, SLOW: 11.0, "mm": 8.0})
    assert [each() for each in launches(operands, [16])] == [9.0, 11.0]


def test_all_times_are_kept_as_lines(monkeypatch, tmp_path):
    found = tuned(monkeypatch, {FAST: 9.0, SLOW: 11.0, "mm": 8.0})
    for _ in range(2):
        append_times(tmp_path / "times", {"gpu": "A"}, found)
    lines = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert lines[0] == lines[1] and (lines[0]["n"], lines[0]["gpu"]) == (96, "A")
    times = {"16x64x64 w4 s5 swap": 9.0, "16x64x64 w4 s4 swap": 11.0, "mm": 8.0}
    assert lines[0]["us"] == {"16": times} and lines[0]["peer_us"] == {"16": 10.0}


def test_gathered_row_layers_add_their_columns():
    found = tuned_gathered_products(["qwen3-8b"], (1, 4))
    assert [(p.n, p.k) for p in found] == [(1024, 4096), (1024, 12288), (4096, 4096), (4096, 12288)]
    assert {p.kind for p in found} == {"column"}
    assert not {*found} & {*tuned_products(["qwen3-8b"], (1, 4))}


LINEAR_LAYERS = ColumnLinear | GatedLinear | RowLinear | GatheredLinear


def layers_of(module):
    """Every linear layer and table below a model."""
    found = []
    for value in vars(module).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, LINEAR_LAYERS | VocabularyTable):
                found.append(part)
            elif type(part).__module__.startswith(("tpdet.models", "tpdet.layers")):
                found += layers_of(part)
    return found


@pytest.mark.parametrize("row_layers", ["fold", "gather"])
def test_products_are_those_of_the_model_that_is_built(tmp_path, row_layers):
    directory = tmp_path / "model"
    make_model(
        directory,
        like="qwen3",
        hidden=128,
        layers=1,
        heads=4,
        head_dim=64,
        vocab=1040,
        intermediate=384,
    )
    config = load_model_config(directory)
    partition = make_partition(config, SoloWorld(), "pairs", None, row_layers)
    source = open_weights(directory, config, "auto", 0, True, torch.device("cpu"))
    built = set()
    for layer in layers_of(Decoder(source, partition, 64)):
        if isinstance(layer, ColumnLinear | GatheredLinear):
            built.add(Product("column", *layer.weight.shape))
        elif isinstance(layer, GatedLinear):
            built.add(Product("gated", *layer.weight.shape))
        elif isinstance(layer, RowLinear):
            leaves, n, k = layer.weight_LNK.shape
            built.add(Product("row", n, k, leaves, write_roots(layer._roots)))
        else:
            built.add(Product("head", *layer.table_VH.shape))
    assert set(rank_products(partition)) == built


@pytest.mark.parametrize(("name", "joins"), [("qwen3.5-35b-a3b", True), ("glm-4.5-air", False)])
def test_leaves_that_join_lanes_are_in_no_table(name, joins):
    """Packed ones are multiplied by themselves, so a rank has the product all the same."""
    partition = cut_for(find_model(name), 2, "tree")
    (down,) = [of_layer for of_layer in layer_products(partition) if of_layer.name == "shared_down"]
    assert down.joined == joins and down.product in rank_products(partition)
    assert (down.product in table_products(partition)) != joins


def test_a_head_is_tuned_up_to_its_rows():
    assert buckets_of(Product("head", 96, 64), 8192)[-1] == 256
    assert buckets_of(COLUMN, 8192)[-1] == 8192
    assert buckets_of(COLUMN, 100)[-1] == 96


class Made:
    """Operands whose tiles and libraries take `times`; those in `wrong` have other bits."""

    products, cold, finalists = (COLUMN,), [torch.zeros(1)], 4

    def __init__(self, times, wrong=()):
        self.times, self.wrong = times, wrong

    def candidates(self, product, bucket):
        return {
            title(name): TunedCandidate(
                ProductChoice(bucket, SLOW if name in LIBRARIES else name, library(name)),
                title(name),
                lambda weight, name=name: self.times[name],
                lambda kind, name=name: (name, kind) in self.wrong,
            )
            for name in self.times
        }

    def peer(self, bucket):
        return lambda weight: 10.0


def title(name):
    return name if name in LIBRARIES else format_tile(name)


def library(name):
    return name if name in LIBRARIES else None


def tuned(monkeypatch, times, wrong=()):
    """What a bucket of 16 rows gets where a graph is its time."""
    monkeypatch.setattr(measure, "capture", lambda run, items: run(items[0]))
    monkeypatch.setattr(measure, "interleaved_us", lambda graphs, calls, repeats: list(graphs))
    [found] = products.tune(Made(times, wrong), [16], 1)
    return found


def test_the_fastest_in_the_class_is_chosen(monkeypatch):
    found = tuned(monkeypatch, {FAST: 9.0, SLOW: 11.0, "mm": 8.0, "addmm": 7.0})
    assert found.rows[16] == TunedRow(ProductChoice(16, FAST, "addmm"), 7.0, 9.0, 10.0)
    assert not found.refused


def test_other_bits_are_refused_and_named(monkeypatch):
    wrong = {(FAST, "heavy"), ("mm", "random"), ("mm", "cancelling")}
    found = tuned(monkeypatch, {FAST: 9.0, SLOW: 11.0, "mm": 8.0}, wrong)
    assert found.rows[16].choice == ProductChoice(16, SLOW)
    assert found.refused == {
        "16x64x64 w4 s5 swap": ["16 (heavy)"],
        "mm": ["16 (random, cancelling)"],
    }
    with pytest.raises(RuntimeError, match="no tile keeps"):
        tuned(monkeypatch, {FAST: 1.0}, {(FAST, "random")})


def test_a_library_must_gain_something(monkeypatch):
    found = tuned(monkeypatch, {FAST: 8.05, "mm": 8.0})
    assert found.rows[16].choice == ProductChoice(16, FAST) and found.rows[16].us == 8.05


def test_bits_are_compared_at_the_least_rows_of_a_bucket_too():
    assert [products.fewest_rows(m) for m in (1, 2, 64, 512)] == [1, 2, 49, 257]


def a_tuned(n, tile=FAST):
    return TunedProduct(
        Product("column", n, 64), {16: TunedRow(ProductChoice(16, tile, "mm"), 1.234, 2.0, 1.5)}
    )


def test_the_file_is_canonical_and_joined(tmp_path):
    path = tmp_path / "tables" / "gpu.json"
    write_table(path, {"gpu": "A", "date": "1"}, [a_tuned(96)])
    write_table(path, {"gpu": "A", "date": "2"}, [a_tuned(32), a_tuned(96, SLOW)])
    text = path.read_text()
    table = parse_table(text, "file")
    assert [product.n for product in table.products] == [32, 96]
    assert table.products[COLUMN][16].tile == SLOW and table.environment["date"] == "2"
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    write_table(path, {"gpu": "A", "date": "2", "torch": "new"}, [a_tuned(64)])
    assert [product.n for product in parse_table(path.read_text(), "file").products] == [64]
    assert [entry.name for entry in path.parent.iterdir()] == ["gpu.json"]


def test_what_is_no_table_is_not_written_over(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"gpu\.json"):
        write_table(path, {"gpu": "A"}, [a_tuned(96)])
    assert path.read_text() == "[]"


def test_gates_and_ups_in_fp32_must_not_fill_the_memory():
    gated = Product("gated", 96, 64)
    assert library_ways(gated, GATED_LIBRARY_ROWS) == LIBRARIES[:1]
    assert library_ways(gated, 2 * GATED_LIBRARY_ROWS) == ()
    assert library_ways(Product("head", 96, 64), 8192) == LIBRARIES[:1]
    assert library_ways(COLUMN, 8192) == LIBRARIES


def test_the_geometric_mean():
    assert abs(geometric_mean([0.5, 2.0, 1.0]) - 1.0) < 1e-12


def test_a_whole_run_on_a_made_up_gpu(monkeypatch, tmp_path, capsys):
    """All but the kernels and the clock: libraries that leave the class above 100 columns."""

    def exact(x, weight, bias, out_dtype, variant=None):
        products = x.double()[:, None] * weight.double()[None]
        return products.sum(-1).float().to(out_dtype)

    def library(x, weight, out_dtype, rows, way):
        y = exact(x, weight, None, out_dtype)
        return y if weight.shape[0] == 96 else y.nextafter(torch.full_like(y, 9.0))

    def gated(x, weight, tile=None, activation="silu"):
        return activate_and_multiply(exact(x, weight, None, torch.float32), x.dtype)

    def gated_library(x, weight, rows, way, activation="silu"):
        y = gated(x, weight)
        return y if weight.shape[0] == 96 else y.nextafter(torch.full_like(y, 9.0))

    def capture(run, weights):
        run(weights[0])
        return str(run)

    def times(graphs, calls, repeats):
        peers.add("linear_and_activation" in graphs[0])
        return [1.0 if "library" in graph else 2.0 for graph in graphs]

    peers = set()
    cuda = {"get_device_name": "A GPU", "get_device_capability": (9, 0), "synchronize": None,
            "empty_cache": None,
            "get_device_properties": SimpleNamespace(
                name="A GPU", multi_processor_count=132, major=9, minor=0)}  # fmt: skip
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    monkeypatch.setattr(library_gemm, "cublas_version", lambda: "13.1.0")
    monkeypatch.setattr(admission, "column_gemm", exact)
    monkeypatch.setattr(admission, "library_product", library)
    monkeypatch.setattr(admission, "gated_gemm", gated)
    monkeypatch.setattr(admission, "gated_library_product", gated_library)
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "interleaved_us", times)
    monkeypatch.setattr(run, "compile_all_of", lambda launches: (0, 0))
    path, tried = tmp_path / "a-gpu.json", [COLUMN, Product("column", 128, 64),
                                               Product("head", 96, 64), Product("gated", 96, 64),
                                               Product("gated", 160, 64)]  # fmt: skip
    tune_products(tried, Effort(2, 3), torch.device("cpu"), path)
    said = capsys.readouterr().out
    assert (
        "other bits, not used: mm at 1 2 rows" in said and "10 entries of the shape table" in said
    )
    table = parse_table(path.read_text(), "file")
    libraries = [
        {choice.library for choice in table.products[product].values()} for product in tried
    ]
    assert libraries == [{"mm"}, {None}, {"mm"}, {"mm"}, {None}]
    assert peers == {False, True}, "a gated product's peer is linear and the activation"
    assert table.environment["cublas"] == "13.1.0"
    short = tmp_path / "short.json"
    tune_products(tried, Effort(2, 3, 0.0, tmp_path / "times"), torch.device("cpu"), short)
    assert list(parse_table(short.read_text(), "file").products) == tried[:1]
    assert "4 of 5 not tuned" in capsys.readouterr().out
    assert len((tmp_path / "times").read_text().splitlines()) == 1
    missing = Effort(2, 3, missing=True)
    tune_products(tried, missing, torch.device("cpu"), short)
    assert "4 products to tune, 1 in" in capsys.readouterr().out
    assert short.read_text() == path.read_text()
    tune_products(tried, missing, torch.device("cpu"), short)
    assert "0 products to tune, 5 in" in capsys.readouterr().out
