"""`tpdet bench`: latency and throughput on the CPU, floors, what a run leaves, refusals."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.lib.forked import run_forked
from tests.lib.tree import ROOT
from tpdet.checkpoint.model_config import load_model_config
from tpdet.cli import main
from tpdet.client.engine_settings import engine_config
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import UsageError
from tpdet.kernels import order
from tpdet.kernels.cuda.hardware import RATES
from tpdet.models.products import model_products
from tpdet.tools.bench import exchange
from tpdet.tools.bench.arguments import BENCH, NAMES, complete
from tpdet.tools.bench.engine import engine_row
from tpdet.tools.bench.latency import decode_tokens, time_latency
from tpdet.tools.bench.load import lengths, prompt
from tpdet.tools.bench.spec import LatencySpec, MixedSpec
from tpdet.tools.bench.throughput import time_mixed
from tpdet.tools.measurement.floor import (
    decode_work,
    exchange_seconds,
    mixed_work,
    prefill_work,
)
from tpdet.tools.measurement.results_file import newest_rows
from tpdet.tools.measurement.rows import BenchRow, finish, print_rows
from tpdet.tools.worlds.lists import parse_range
from tpdet.tools.worlds.machine import Machine
from tpdet.tools.worlds.shapes import named_config, shards

RUN_KEYS = {"bench", "gpu", "gpus", "commit", "torch", "triton", "driver", "date", "python",
            "command", "rows"}  # fmt: skip


def spec(batches, contexts, steps=3):
    return LatencySpec(
        settings={},
        batches=batches,
        contexts=contexts,
        steps=steps,
        prefill_tokens=(20, 30),
        prefill_prompts=2,
    )


def engine(model, pages, **settings):
    given = {"kv_pages": pages, "max_num_seqs": 16, "max_num_batched_tokens": 64} | settings
    config = EngineConfig.from_values(model=str(model), device="cpu", **given)
    return Engine(config, SoloWorld())


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def throughput(*arguments, worlds):
    """The record of a run whose worlds are forks, as it is."""
    done = run_forked("tpdet", "bench", "throughput", *arguments, children=worlds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_throughput_ends_in_a_line_that_is_the_appended_run(tiny_model, tmp_path):
    arguments = (tiny_model(), "--tp", "1,2", "--requests", "5")
    arguments += ("--input", "4:20", "--generate", "3", "--output", tmp_path)
    record = throughput(*arguments, worlds=((), ((), ())))
    (run,) = json.loads((tmp_path / "latency.cpu.json").read_text())
    assert run == record and record.keys() == RUN_KEYS and record["bench"] == "throughput"
    cases = [(row["case"], row["tp"], row["unit"]) for row in run["rows"]]
    assert cases == [
        ("mixed", 1, "s"),
        ("mixed output", 1, "tokens/s"),
        ("mixed", 2, "s"),
        ("mixed output", 2, "tokens/s"),
    ]
    for seconds, rate in zip(run["rows"][::2], run["rows"][1::2], strict=True):
        assert rate["value"] == pytest.approx(15 / seconds["value"])


def test_approximate_runs_say_so_in_their_rows(tiny_model, tmp_path):
    arguments = (tiny_model(), "--requests", "2", "--input", "4", "--generate", "2")
    record = throughput(*arguments, "--output", tmp_path, "--approximate", worlds=((),))
    assert {row["mode"] for row in record["rows"]} == {"approximate"}
    path = tmp_path / "latency.cpu.json"
    strict = [{**row, "mode": "pairs"} for row in record["rows"]]
    path.write_text(json.dumps([*json.loads(path.read_text()), {**record, "rows": strict}]))
    assert [len(rows) for _, rows in newest_rows(path)] == [2, 2]  # neither stands for the other


def test_latency_times_every_batch_at_every_context(tiny_model):
    rows, notes = time_latency(engine(tiny_model(), 64), spec((1, 3), (8, 40)))
    assert not notes
    found = [(row.case, row.batch, row.context, row.unit) for row in rows]
    assert found == [
        ("decode", 1, 8, "ms"),
        ("decode", 3, 8, "ms"),
        ("decode", 1, 40, "ms"),
        ("decode", 3, 40, "ms"),
        ("prefill", 2, 20, "tokens/s"),
        ("prefill", 2, 30, "tokens/s"),
    ]
    assert all(row.value > 0 for row in rows)


def test_rows_name_their_row_layers(tiny_model):
    settings = {"model": str(tiny_model()), "device": "cpu", "kv_pages": 8, "drafts": "off"}
    for told, mode in (
        ({"fold_order": "pairs"}, "pairs"),
        ({"fold_order": "pairs", "drafts": "ngram"}, "pairs, drafts ngram"),
        ({}, order.DEFAULT_FOLD_ORDER),
        ({"row_layers": "gather"}, "gather"),
        ({"row_layers": "gather", "transport": "gather"}, "gather, gather"),
    ):
        made = Engine(EngineConfig.from_values(**(settings | told)), SoloWorld())
        assert engine_row(made, case="x", value=1.0, unit="ms").mode == mode


def test_what_the_cache_cannot_hold_is_left_out_and_said(tiny_model):
    made = engine(tiny_model(), 4, max_model_len=60)
    rows, notes = time_latency(made, spec((1, 8, 99), (40, 55)))
    assert [(row.batch, row.context) for row in rows if row.case == "decode"] == [(1, 40)]
    assert "batch 8, context 40: left out, it takes 8 pages of 4" in notes[0]
    assert "batch 99, context 40: left out, it is over --max-num-seqs 16" in notes[1]
    assert "batch 1, context 55: left out, 64 tokens are over --max-model-len 60" in notes[2]
    assert len(notes) == 5


def test_the_first_sequences_decode_until_the_last_ones_are_read():
    assert decode_tokens(spec((4,), (16,)), 64, 1, 16) == 3 + 3 + 2 + 1
    assert decode_tokens(spec((4,), (600,)), 64, 4, 600) == 3 + 3 + 2 + 40


def test_floors_are_the_measured_ones():
    config, rates = named_config("qwen3-8b"), RATES["NVIDIA H200"]
    floors = [decode_work(config, 1, 128).over(tp).seconds(rates) * 1e3 for tp in (1, 2, 4)]
    assert [round(floor, 1) for floor in floors] == [3.4, 1.7, 0.8]
    many = decode_work(config, 256, 2048)
    assert many.bytes > 2 * decode_work(config, 1, 1).bytes  # keys and values count
    work = prefill_work(config, 16, 4096)
    assert 16 * 4096 / work.seconds(rates) == pytest.approx(64_000, rel=0.05)
    mixed = mixed_work(config, [64, 1024], 128)
    assert mixed.bytes == 128 * prefill_work(config, 1, 1).bytes


def test_prompts_and_lengths_follow_from_their_seed():
    assert lengths(256, 64, 1024, 0) == lengths(256, 64, 1024, 0) != lengths(256, 64, 1024, 1)
    drawn = lengths(5000, 1, 3, 0)
    assert {1, 2, 3} == set(drawn)
    assert prompt(5, 1000, 3) == prompt(9, 1000, 3)[:5] and max(prompt(99, 7, 0)) < 7


def test_a_rank_holds_its_share_of_the_products():
    (found,) = [model_products(p) for _, p in shards(["qwen3-8b"], [4], "pairs")]
    assert [(each.name, each.n, each.k) for each in found] == [
        ("qkv", 1536, 4096),
        ("o", 4096, 1024),
        ("gate_up", 6144, 4096),
        ("down", 4096, 3072),
        ("head", 37984, 4096),
    ]


def row(value, **fields):
    return BenchRow(case="decode", value=value, unit="ms", tp=1, **fields)


def test_runs_are_appended_newest_last(tmp_path, capsys):
    gpu = Machine(gpu="NVIDIA H200", gpus=2, driver="580")
    finish("gemm", gpu, [row(1.0, batch=1)], tmp_path)
    finish("gemm", gpu, [row(2.0, batch=1, floor=0.5, ratio=4.0)], tmp_path)
    runs = json.loads((tmp_path / "gemm.h200.json").read_text())
    assert [run["rows"][0]["value"] for run in runs] == [1.0, 2.0]
    assert runs[1] == last_line(capsys)
    assert all(run["gpus"] == 2 and run["driver"] == "580" for run in runs)
    finish("gemm", gpu, [row(3.0)], tmp_path / "named.json")
    assert len(json.loads((tmp_path / "named.json").read_text())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemm.h200.json", "named.json"]


def test_a_table_has_no_empty_column(capsys):
    print_rows([row(1.0, batch=1)])
    out = capsys.readouterr().out
    assert "value" in out and not any(word in out for word in ("floor", "peer", "ratio"))
    print_rows([row(1.0, batch=1), row(2.0, batch=2, floor=0.5, ratio=4.0)])
    out = capsys.readouterr().out
    assert "floor" in out and "ratio" in out and "peer" not in out


def test_a_results_file_that_is_none_is_not_overwritten(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError):
        finish("gemm", Machine(), [row(1.0)], path)
    assert path.read_text() == "{"


def test_only_the_newest_figure_of_a_case_counts(tmp_path):
    for rows in ([row(1.0, batch=1), row(2.0, batch=2)], [row(3.0, batch=1)]):
        finish("latency", Machine(), rows, tmp_path / "x.json")
    (_, left), (_, fresh) = newest_rows(tmp_path / "x.json")
    assert [r["value"] for r in left] == [2.0] and [r["value"] for r in fresh] == [3.0]


def test_files_of_many_rows_are_summarised(tmp_path, monkeypatch):
    place = ROOT / "scripts" / "result_tables.py"
    found = importlib.util.spec_from_file_location("result_tables", place)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found.loader.exec_module(module)
    rows = [
        BenchRow(
            case="gemm o",
            value=1.0,
            unit="us",
            tp=1,
            batch=b,
            peer="linear",
            peer_value=1.0,
            ratio=r,
        )
        for b, r in ((1, 2.0), (8, 0.5))
    ]
    finish("gemm", Machine(), rows, tmp_path)
    assert "| gemm o |  |  | 1 | linear | 2 | 1.00 | 2.00 at batch 1 |" in module.value_tables(
        tmp_path / "gemm.cpu.json"
    )


def test_the_old_form_means_latency():
    assert complete(["bench", "o/m", "--tp", "2"]) == ["bench", "latency", "o/m", "--tp", "2"]
    assert complete(["bench", "."]) == ["bench", "latency", "."]
    assert complete(["bench", "--tp", "2", "m"]) == ["bench", "latency", "--tp", "2", "m"]
    for same in (["bench"], ["bench", "--help"], ["env"], *(["bench", b] for b in NAMES)):
        assert complete(same) == same


@pytest.mark.parametrize("bench", ["gemm", "experts", "attention", "sampler", "allreduce"])
def test_kernels_need_a_gpu(bench, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", bench]) == 2
    assert f"tpdet bench {bench} times GPU kernels" in capsys.readouterr().err


def test_an_exchange_needs_two_ranks(monkeypatch, capsys):
    monkeypatch.setattr(exchange, "gpu_only", lambda bench: None)
    assert main(["bench", "allreduce", "--tp", "1,2"]) == 2
    assert "2 ranks or more" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "5:2", "0:4", "1:2:3"])
def test_ranges_of_lengths(text):
    assert parse_range("64:1024") == (64, 1024) and parse_range("7") == (7, 7)
    with pytest.raises(UsageError, match="64:1024"):
        parse_range(text)


def test_a_model_that_is_not_there_is_refused_before_a_world_starts(capsys):
    assert main(["bench", "throughput", "/nowhere"]) == 66


@pytest.mark.parametrize("bench", ["latency", "throughput", "generate", "drafts"])
def test_a_shape_by_name_has_random_weights(bench, monkeypatch, capsys):
    asked = []

    def started(tps, spec, config):
        asked.append((load_model_config(config.model), spec.settings["model"]))
        raise UsageError("started")

    monkeypatch.setattr(f"tpdet.tools.bench.{bench}.run_worlds", started)
    assert main(["bench", bench, "qwen3-8b", "--tp", "1"]) == 66
    assert (
        "'qwen3-8b' is a shape without weights: add --load-format dummy" in capsys.readouterr().err
    )
    ask = ["bench", bench, "qwen3-8b", "--tp", "1", "--load-format", "dummy"]
    if bench == "drafts":
        assert main(ask) == 2 and "add --cases synthetic" in capsys.readouterr().err
        ask += ["--cases", "synthetic"]
    assert main(ask) == 2
    ((model, directory),) = asked
    assert model.hidden_size == 4096 and not Path(directory).exists()


def test_the_floor_of_an_exchange_is_the_cheaper_way():
    rates = RATES["NVIDIA H200"]
    plan = order.fold_plan("pairs", 8, 4)  # one root a rank
    assert exchange_seconds(rates, plan, 1000) == pytest.approx(1000 * 6 * 0.75 / rates.link)
    plan = order.fold_plan("pairs", 8, 2)  # rank 1 sends two roots
    assert exchange_seconds(rates, plan, 1000) == pytest.approx(1000 * 10 / 2 / rates.link)


def engine_flags(*arguments):
    """What `tpdet bench latency` gives the engine."""
    parser = argparse.ArgumentParser()
    BENCH.add(parser.add_subparsers())
    options = parser.parse_args(["bench", "latency", "m", *arguments])
    return engine_config(options, {}).model_dump(exclude_unset=True)


def test_benchmarks_have_the_engines_defaults_and_no_others():
    assert engine_flags() == {"model": "m"}
    found = engine_flags("--budget", "700", "--max-model-len", "2k", "--approximate")
    expected = {"max_num_batched_tokens": 700, "max_model_len": 2000, "approximate": True}
    assert found == {"model": "m"} | expected
    assert engine_flags("--max-num-batched-tokens", "700")["max_num_batched_tokens"] == 700


def test_no_prompt_of_a_benchmark_is_found_in_the_prefix_cache(tiny_model):
    made = engine(tiny_model(), 64, max_model_len=1024, max_num_batched_tokens=600)
    cases = LatencySpec(
        settings={},
        batches=(1, 2),
        contexts=(260,),
        steps=2,
        prefill_tokens=(260, 300),
        prefill_prompts=1,
    )
    time_latency(made, cases)
    case = MixedSpec(settings={}, requests=3, shortest=260, longest=300, generate=2, seed=0)
    time_mixed(made, case)
    totals = made.statistics().totals
    assert totals.prefix_query_tokens > 0 and totals.prefix_hit_tokens == 0
