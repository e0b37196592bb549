"""`tpdet tune` of layers of experts without a GPU: choices by made-up times, and entries read."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts import tiles as expert_tiles
from tpdet.kernels.cuda.experts.candidates import block_forms, fits, tiles_of
from tpdet.kernels.cuda.experts.tiles import layer_tiles, static_tiles, tiles_in_use, weights_of
from tpdet.kernels.cuda.gemm.choice.expert_entries import TOKENS, LayerTiles
from tpdet.kernels.cuda.gemm.choice.shape_table import parse_table
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product
from tpdet.tools.tune import experts as tuner_module
from tpdet.tools.tune import measure
from tpdet.tools.tune.experts import LayerRow, LayerTuner, TunedLayer, step_sizes
from tpdet.tools.tune.shapes import Expert, expert_layers
from tpdet.tools.tune.table_file import layers_in, write_table

CPU = torch.device("cpu")
LAYER = ExpertLayer(128, 64, 4, 8, 2)
GATE_UP, DOWN = (tiles_of(16, weight, hardware.H200) for weight in weights_of(LAYER, 2))
FACTS = {"gpu": "NVIDIA H200", "date": "1"}


@pytest.fixture
def made_up_gpu(monkeypatch):
    """Kernels return what ran them; a graph is that, and its time stands in the dict."""
    times: dict[object, float] = {}
    wrong: set[Tile] = set()
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    sorted_tokens = lambda ids, experts, block_rows, by_token: SimpleNamespace(
        block_rows=block_rows, by_token=by_token, rows=block_rows
    )
    kernels = {
        "sort_tokens": sorted_tokens,
        "rows_in_blocks": lambda x, found: x,
        "route": lambda *_: SimpleNamespace(ids=None, weights=None, sorted_tokens=None),
        "grouped_product": lambda *told: told[4],
        "expert_sums": lambda *_, tiles, **__: tiles,
        "differs": lambda weight, tile, *_: weight.gated and tile in wrong,
    }
    by_time = lambda graphs, calls, repeats: [times.get(graph, 10.0) for graph in graphs]
    monkeypatch.setattr(tuner_module, "COLD_BYTES", 1.0)
    for name, fake in kernels.items():
        monkeypatch.setattr(tuner_module, name, fake)
    monkeypatch.setattr(measure, "capture", lambda run, items: run(items[0]))
    monkeypatch.setattr(measure, "interleaved_us", by_time)
    return times, wrong


def test_the_fastest_pair_in_the_class_is_chosen(made_up_gpu):
    times, wrong = made_up_gpu
    up, up_next, down = GATE_UP[2], GATE_UP[1], DOWN[1]
    times |= {up: 5.0, up_next: 6.0, down: 4.0, LayerTiles(up, down, True): 3.0,
              LayerTiles(up_next, down, True): 4.0}  # fmt: skip
    found = LayerTuner(Expert(LAYER), 1, CPU).tune([16])
    static = static_tiles(LAYER, 16, 2, hardware.H200)
    assert found.rows[16].tiles == LayerTiles(up, down, True) != static
    assert (found.rows[16].us, found.rows[16].static_us) == (3.0, 10.0) and not found.refused
    wrong.add(up)
    found = LayerTuner(Expert(LAYER), 1, CPU).tune([16])
    assert found.rows[16].tiles == LayerTiles(up_next, down, True) and len(found.refused) == 1
    times[static] = 3.02
    found = LayerTuner(Expert(LAYER), 1, CPU).tune([16])
    assert found.rows[16].tiles == static, "within a hundredth the static choice stays"


def test_blocks_suit_the_rows_of_an_expert():
    layer = ExpertLayer(2048, 768, 128, 128, 8)
    for tokens in TOKENS:
        forms = block_forms(layer, tokens)
        mean = layer.mean_rows(tokens)
        assert forms and all(height >= min(tokens, 0.75 * mean, 64) for height, _ in forms)
        assert all(tokens <= height for height, by_token in forms if by_token)
        for weight in weights_of(layer, 2):
            assert all(
                fits(tile, weight, hardware.H200)
                for height, _ in forms
                for tile in tiles_of(height, weight, hardware.H200)
            )
    assert not any(by_token for _, by_token in block_forms(layer, 64))
    wide = weights_of(ExpertLayer(2880, 2880, 32, 32, 4), 2)[0]
    depths = {tile.depth for tile in tiles_of(16, wide, hardware.H200)}
    assert depths == {64} and {tile.depth for tile in GATE_UP} == {64, 128}


def a_tuned(layer, us=2.0):
    row = LayerRow(LayerTiles(GATE_UP[0], DOWN[0], True), us, 3.0, 1.0)
    last = LayerRow(LayerTiles(GATE_UP[1], DOWN[1], False), us, 3.0, 1.0)
    return TunedLayer(Expert(layer), {16: row, 64: last})


def test_tuned_layers_are_written_joined_and_taken(monkeypatch, tmp_path):
    path, other = tmp_path / "gpu.json", ExpertLayer(128, 64, 8, 8, 2)
    write_table(path, FACTS, [], [a_tuned(LAYER), a_tuned(other)])
    write_table(path, FACTS, [], [a_tuned(LAYER, 1.5)])
    data = json.loads(path.read_text())
    assert [entry["tokens"]["16"]["us"] for entry in data["experts"]] == [1.5, 2.0]
    assert layers_in(path, FACTS) == {LAYER, other} and not layers_in(path, {"gpu": "another"})
    table = parse_table(path.read_text(), str(path))
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    named = {"NVIDIA H200": table.experts}
    monkeypatch.setattr(expert_tiles, "tuned_experts", lambda gpu: named.get(gpu, {}))
    few, many = LayerTiles(GATE_UP[0], DOWN[0], True), LayerTiles(GATE_UP[1], DOWN[1], False)
    for tokens, wanted in ((1, few), (16, few), (17, many), (9000, many)):
        assert layer_tiles(LAYER, tokens, 2, CPU) == wanted
    unknown = ExpertLayer(128, 64, 2, 8, 2)
    for layer, size in ((unknown, 2), (LAYER, 4)):
        assert layer_tiles(layer, 16, size, CPU) == static_tiles(layer, 16, size, hardware.H200)
    gate_up, down = weights_of(LAYER, 2)
    products = Product("gated", 128, 128), Product("column", 128, 64)
    wanted = {(gate_up, GATE_UP[0], True), (gate_up, GATE_UP[1], False)}
    wanted |= {(down, DOWN[0], True), (down, DOWN[1], False)}
    assert {*tiles_in_use(products, LAYER, 2, CPU)} == wanted
    static = {*tiles_in_use(products, None, 2, CPU)}
    for tokens in (1, 16, 64, 4096):
        tiles = static_tiles(LAYER, tokens, 2, hardware.H200)
        assert {
            (gate_up, tiles.gate_up, tiles.by_token),
            (down, tiles.down, tiles.by_token),
        } <= static


def test_damaged_layers_are_refused_by_name(tmp_path):
    path = tmp_path / "gpu.json"
    write_table(path, FACTS, [], [a_tuned(LAYER)])
    text = path.read_text()
    high = "32x128x64 w4 s9 swap tma specialised"
    for change in (
        lambda layer: layer.update(held=0),
        lambda layer: layer.update(dtype="float16"),
        lambda layer: layer.update(tokens={}),
        lambda layer: layer["tokens"]["64"].update(by_token=True),
        lambda layer: layer["tokens"]["64"].update(down=high),
        lambda layer: layer["tokens"]["64"].update(down="16x64x64 w4 s5 tma"),
        lambda layer: layer["tokens"].update({"17": layer["tokens"]["16"]}),
        lambda layer: layer["tokens"].update({"32": layer["tokens"]["16"]}),
        lambda layer: layer.pop("width"),
    ):
        data = json.loads(text)
        change(data["experts"][0])
        with pytest.raises(ValueError, match=r"the\.json.*tpdet tune"):
            parse_table(json.dumps(data), "the.json")
    twice = json.loads(text)
    twice["experts"] *= 2
    with pytest.raises(ValueError, match="twice"):
        parse_table(json.dumps(twice), "the.json")
    dense = json.loads(text)
    row = {"tile": high}
    dense["products"] = [{"kind": "column", "n": 96, "k": 64, "leaves": 1, "dtype": "bfloat16",
                          "rows": {"16": row}}]  # fmt: skip
    with pytest.raises(ValueError, match="tile of experts"):
        parse_table(json.dumps(dense), "the.json")


def test_the_layers_of_known_models():
    found = expert_layers(["qwen3-30b-a3b", "qwen3-8b", "gpt-oss-20b"], (1, 2, 16))
    assert [str(each.layer) for each in found] == [
        "experts 768x2048 (128 of 128 experts, 8 chosen)",
        "experts 768x2048 (64 of 128 experts, 8 chosen)",
        "experts 2880x2880 (32 of 32 experts, 4 chosen)",
        "experts 2880x2880 (16 of 32 experts, 4 chosen)",
    ]
    assert [(each.activation, each.biased) for each in found[1:3]] == [
        ("silu", False),
        ("clamped", True),
    ]
    assert step_sizes(100) == (1, 4, 8, 16, 32, 64) and step_sizes(8192) == TOKENS
